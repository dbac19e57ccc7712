"""Read what a run's folder says about the run: its steps, its events, its last recipe."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints import newest_checkpoint, verify
from ...checkpoints.find import STRICT, warn_of
from ...parallel_state import BadCheckpoint, BadInput
from ...storage.file_names import CHECKPOINTS, holds_steps
from ...system import counted
from ..events import NAME_A_RUN, read_events, what_is_there
from ..metrics import is_whole, read_metrics

_ENDS = ("finished", "stopped", "failed")


@dataclass(frozen=True)
class RunRecord:
    """Hold the lines of metrics.jsonl and events.jsonl, and the last complete checkpoint."""

    name: str
    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]
    checkpoint: str | None

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Return the starts and resumes, in order."""
        return _attempts(self.events)

    @property
    def recipe(self) -> dict[str, Any]:
        """Return the recipe of the last attempt; empty if none was noted."""
        return self.attempts[-1].get("recipe", {}) if self.attempts else {}

    @property
    def skipped(self) -> list[str]:
        """Return the steps, from 1, that updated nothing, with the reason."""
        return [f"{int(line['step']) + 1} ({why})" for line in self.steps if (why := line.get("skipped"))]

    @property
    def slow_ranks(self) -> list[str]:
        """Return a line for each rank that the others waited for, the one with the most steps first."""
        times_by_rank: dict[str, list[float]] = {}
        for line in self.steps:
            if isinstance(times := line.get("slow_times"), int | float):
                rank = f"rank {line.get('slow_rank')} on {line.get('slow_host')}"
                times_by_rank.setdefault(rank, []).append(times)
        return [
            f"{rank}: {counted(len(times), 'time')}, up to {max(times):.1f} x the median"
            for rank, times in sorted(times_by_rank.items(), key=lambda row: -len(row[1]))
        ]

    @property
    def state(self) -> str:
        """Return the state of the run in words."""
        last = next((event for event in reversed(self.events) if event["event"] != "saved"), None)
        if last is None:
            return "unknown: it has no events"
        step, event = last["step"], last["event"]
        if event == "finished":
            goal = last.get("goal", step)
            return (
                f"finished all {counted(goal, 'step')}"
                if step >= goal
                else f"ended at step {step:,} of {goal:,}, as asked"
            )
        if event in ("stopped", "failed"):
            return f"{event} after step {step:,}"
        return f"still running, or killed without a word, after step {self.done:,}"

    @property
    def done(self) -> int:
        """Return how many steps have metrics, up to the last."""
        return int(self.steps[-1]["step"]) + 1 if self.steps else 0

    def column(self, key: str) -> list[tuple[int, float | None]]:
        """Return (step from 1, value) of the steps that have this number; ``None`` if it was not finite."""
        return [
            (int(line["step"]) + 1, line[key] if isinstance(line[key], int | float) else None)
            for line in self.steps
            if key in line
        ]


def with_vanished(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events, with a ``vanished`` added between two attempts of which the first has no end."""
    history: list[dict[str, Any]] = []
    open_attempt = False
    for event in events:
        if event["event"] in ("started", "resumed"):
            if open_attempt:
                step = max(history[-1]["step"], event.get("reached", 0))
                history.append({"event": "vanished", "step": step, "time": None})
            open_attempt = True
        elif event["event"] in _ENDS:
            open_attempt = False
        history.append(event)
    return history


def check_step(checkpoint: Path, step: int | None) -> None:
    """Refuse a checkpoint in a run's folder that states more steps than the recipes of the run had."""
    events = checkpoint.parent.parent / "events.jsonl"
    if step is None or checkpoint.parent.name != "checkpoints" or not events.is_file():
        return
    goals = [attempt.get("recipe", {}).get("steps") for attempt in _attempts(read_events(events))]
    most = max((goal for goal in goals if isinstance(goal, int)), default=None)
    if most is not None and step > most:
        raise BadCheckpoint(
            checkpoint, "step", expected=f"at most {most:,}, the run's steps", found=f"{step:,}"
        )


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder; ``BadInput`` if no run has written in it."""
    steps = [line for line in read_metrics(folder / "metrics.jsonl") if is_whole(line)]
    events = read_events(folder / "events.jsonl")
    if not steps and not events:
        expected = "a run's folder with metrics.jsonl or events.jsonl"
        raise BadInput(folder, expected=expected, found=what_is_there(folder), todo=NAME_A_RUN)
    return RunRecord(str(folder), steps, events, _newest(folder))


def _attempts(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] in ("started", "resumed")]


def _newest(folder: Path) -> str | None:
    """Return the newest complete checkpoint; warn of newer ones, and if none is complete.

    With ``STRICT`` its bytes are verified.
    """
    if not holds_steps(folder / CHECKPOINTS):
        return None
    try:
        newest = newest_checkpoint(folder)
    except BadCheckpoint as error:
        if STRICT.get():
            raise
        warn_of([str(error)])
        return None
    warn_of(newest.passed_over)
    if STRICT.get():  # no other use of it here would find a damaged byte
        verify(newest.directory, newest.manifest)
    return str(newest.directory)
