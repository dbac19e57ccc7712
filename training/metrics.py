"""What is known of each step, and its line in ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step. ``loss`` is the mean over the step's tokens in nats, ``grad_norm`` is before clipping.

    ``memory`` is in bytes, of the rank that uses most. MFU is a share, ``None`` where the peak of the devices
    is not known. ``skipped``: why nothing was updated (``overflow``, ``spike``), if so; ``skips``: how often
    that was so by now. ``loss_scale``: of float16 alone. Without an evaluation after it, its numbers are
    absent.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_second: float
    seconds: float
    mfu_causal: float | None = None
    mfu_full: float | None = None
    memory: int | None = None
    skipped: str | None = None
    skips: int = 0
    loss_scale: float | None = None
    balance_loss: float | None = None
    router_z_loss: float | None = None
    expert_load: float | None = None
    evaluation_loss: float | None = None
    evaluation_perplexity: float | None = None


class StepLog:
    """A file of one JSON line a step: append-only; a resume first drops the lines of steps to be repeated.

    ``None`` is left out; what is not finite, which JSON cannot say, is ``null``.
    """

    def __init__(self, path: Path, *, start: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_lines(path) if int(line["step"]) < start] if start else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_finite(line)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _finite(line: Mapping[str, Any]) -> dict[str, Any]:
    said = {key: value for key, value in line.items() if value is not None}
    return {
        key: _finite(value) if isinstance(value, Mapping) else None if _is_odd(value) else value
        for key, value in said.items()
    }


def _is_odd(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``: the fields of ``StepMetrics`` that are known."""
    return read_lines(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON lines; empty if there is none. A last line cut short is left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines
