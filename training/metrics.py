"""What a run says while it goes: one JSON line a step on disk, a line on the terminal now and then."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One step. ``loss`` is the mean over the step's tokens in nats, ``grad_norm`` is before clipping."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_second: float
    seconds: float


class MetricsLog:
    """``metrics.jsonl``: append-only; a resume first drops the lines of steps to be repeated."""

    def __init__(self, path: Path, *, start: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(path) if int(line["step"]) < start] if start else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a ``metrics.jsonl``; empty if there is none. A last line cut short is left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


class Terminal:
    """A line every few steps: loss, gradient norm, learning rate, tokens a second, time left."""

    def __init__(self, *, steps: int, every: int, quiet: bool = False) -> None:
        self.steps, self.every = steps, every
        self._console = Console(quiet=quiet, soft_wrap=True, highlight=False)
        self._began, self._first = time.monotonic(), -1

    def say(self, text: str) -> None:
        self._console.print(text)

    def step(self, metrics: StepMetrics) -> None:
        if self._first < 0:
            self._first, self._began = metrics.step, time.monotonic()
        done = metrics.step - self._first
        if metrics.step % self.every and metrics.step != self.steps - 1 and done:
            return
        left = (time.monotonic() - self._began) / done * (self.steps - 1 - metrics.step) if done else None
        self._console.print(
            f"step {metrics.step + 1:>{len(str(self.steps))}}/{self.steps}  loss {metrics.loss:.4f}  "
            f"grad norm {metrics.grad_norm:.3f}  lr {metrics.lr:.2e}  "
            f"{metrics.tokens_per_second:,.0f} tokens/s  {_duration(left)} left"
        )


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "--:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
