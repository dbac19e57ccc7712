"""Trace chosen steps of chosen ranks with ``torch.profiler``: Chrome traces (chrome://tracing, Perfetto)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Traces:
    """Write ``folder/step-<n>.rank-<r>.json`` for each of ``steps``, from 1, on each of ``ranks``."""

    def __init__(self, folder: Path, *, steps: Collection[int], ranks: Collection[int], rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.steps = frozenset(steps) if rank in ranks else frozenset()

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Trace the step in the ``with`` block if the recipe asks for a trace of it; otherwise do nothing."""
        if step not in self.steps:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as recorded:
            yield
        self.folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self.folder / f"step-{step:08d}.rank-{self.rank:05d}.json"))
