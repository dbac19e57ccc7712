"""Define the figures of each step and their line in ``metrics.jsonl``; measure the memory of this rank."""

import math
import resource
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from ..parallel_state import BadInput, require
from ..parallel_state.engine import accelerator
from ..storage.disk import write_whole, writing
from ..storage.file_names import BROKEN, set_aside_name
from ..storage.small_files import log_line, read_good_lines, read_log
from ..storage.strict_json import fits
from ..system.process_info import own_memory


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Hold the metrics of one step.

    ``loss`` is the mean over the step's tokens in nats, ``grad_norm`` is before clipping. ``memory`` is in
    bytes, of the rank that uses most. MFU is a share, ``None`` if the peak of the devices is not known.
    ``skipped``: why nothing was updated (``overflow``, ``spike``), if so; ``skips``: how many steps were
    skipped so far. ``loss_scale``: of float16 alone. If no evaluation follows the step, its numbers are
    absent. ``slow_rank``, on ``slow_host``: a rank that the others waited for, whose own work took
    ``slow_times`` the median. ``own``: figures of a user's callbacks, by their names.
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
    slow_rank: int | None = None
    slow_host: str | None = None
    slow_times: float | None = None
    own: Mapping[str, Any] | None = None

    def joined(self, figures: Mapping[str, Any], by: str) -> Self:
        """Return these figures and more: fields that are not set yet, and numbers by names of their own.

        Raises ``BadInput`` for a name that is taken, and for what is no number; ``by`` says whose it is.
        """
        line, own = self.line(), dict(self.own or {})
        for name, figure in figures.items():
            if name in line or name == "own":
                expected = "a name that no figure of the step has yet"
                raise BadInput(by, name, expected=expected, found="one that has", todo="Choose another name")
            if name not in self.__slots__:
                todo = "Return a Python number, such as float(tensor)"
                require(isinstance(figure, int | float), by, name, "a number", type(figure).__name__, todo)
                own[name] = figure
        by_field = {name: figure for name, figure in figures.items() if name not in own}
        return replace(self, **by_field, own=own or None)

    def line(self) -> dict[str, Any]:
        """Return the figures that are known, by name, as a line of ``metrics.jsonl`` has them."""
        figures = {name: getattr(self, name) for name in self.__slots__ if name != "own"}
        return {
            name: figure for name, figure in (figures | dict(self.own or {})).items() if figure is not None
        }


class StepLog:
    """Write a file of one JSON line a step; lines are only added.

    A resume first drops the lines of steps that it will repeat, and moves broken lines (a kill or a full disk
    cut them short) to a new file beside it whose name ends in ``.broken`` or ``.broken-2`` and so on; every
    good line stays. ``None`` is left out; a number that is not finite, which JSON cannot express, is
    ``null``. ``reached``: the number of steps, up to the last, that the file had.
    """

    def __init__(self, path: Path, *, start: int) -> None:
        self.path = path
        self.reached = max((line["step"] + 1 for line in read_metrics(path)), default=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        good, broken = _sorted_out(path, start) if start and path.exists() else ([], [])
        if broken:
            _replace(set_aside_name(path, BROKEN), broken)
        _replace(path, good)
        with writing(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        with writing(self.path):
            if not self.path.exists():  # or lines would be lost with the folder, which checkpoints make anew
                self.close()
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a", encoding="utf-8")
            present = {name: figure for name, figure in line.items() if figure is not None}
            self._file.write(log_line(finite(present)) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _sorted_out(path: Path, start: int) -> tuple[list[str], list[str]]:
    """Return the lines of steps before ``start`` as they stand, and the lines that name no step."""
    good, broken = [], []
    for line in read_log(path):
        step = _step(line.value)
        if step is None:
            broken.append(line.text)
        elif step < start:
            good.append(line.text)
    return good, broken


def _replace(path: Path, lines: list[str]) -> None:
    write_whole(path, "".join(f"{line}\n" for line in lines))


def finite(value: Any) -> Any:
    """Return plain data with ``None`` for each number that is not finite, which JSON cannot express."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a step log, such as ``metrics.jsonl``; none if there is no file.

    A line that is broken, or names no step, is passed over.
    """
    return [line for line in read_good_lines(path) if _step(line) is not None]


def is_whole(line: Mapping[str, Any]) -> bool:
    """Tell whether a line has all fields of a step, each of its kind, so that a report can show it.

    ``None`` stands for a number that was not finite.
    """
    return fits({key: math.nan if value is None else value for key, value in line.items()}, StepMetrics)


def _step(line: Mapping[str, Any] | None) -> int | None:
    step = None if line is None else line.get("step")
    return step if type(step) is int and step >= 0 else None


def memory_used(device: torch.device) -> int:
    """Return bytes: the most that tensors have used on the GPU so far, or the CPU process's memory now.

    Without ``/proc``, the most that the process has used.
    """
    if (peak := accelerator.peak_memory(device)) is not None:
        return peak
    if (memory := own_memory()) is not None:
        return memory.resident
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
