"""Measure and log beside the steps of a run: what a callback is, and those that write a run's files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile

from ..parallel_state.engine import accelerator
from ..runs.events import Events, last_recipe, plain_recipe, recipe_changes
from ..runs.metrics import StepLog, StepMetrics
from ..runs.trackers import Tracker, Trackers
from ..simulation.model_flops import Mfu, peak_flops
from .run_plan import flops_of

if TYPE_CHECKING:
    from .trainer import Trainer


class Callback:
    """Measure or log something beside the steps: ``run(recipe, callbacks=[...])`` takes yours.

    Here every method does nothing; write those that you need. All ranks call them alike and in the order of
    the list, so a method may call collectives. A step's ``number`` counts from 0. An error ends the run. No
    checkpoint has what a callback remembers.
    """

    def begin(self, trainer: Trainer, start: int) -> None:
        """Begin before step ``start``, which is 0 unless the run resumes; the weights are there.

        ``trainer`` has this rank's ``model``, ``optimizer``, ``state`` (its place in the layout) and
        ``recipe``; ``trainer.terminal.say`` prints a line on the first rank.
        """

    def around(self, number: int) -> AbstractContextManager[object]:
        """Return a context in which the step runs: its batch, forward, backward and update."""
        return nullcontext()

    def gradients(self, number: int, scale: float) -> None:
        """Look at the gradients of ``scale`` times the loss, summed over the ranks and not yet clipped."""

    def after(self, metrics: StepMetrics) -> Mapping[str, Any] | None:
        """Return figures of the step that has ended, or nothing; ``metrics`` has those known so far.

        The first rank writes its own into ``metrics.jsonl`` by these names, and hands numbers to the
        trackers.
        """
        return None

    def close(self, error: BaseException | None) -> None:
        """End; the last of the list ends first. ``error``: what ended the run, if not its last step."""


class Callbacks:
    """Call each of a list in its order, and end them in the reverse order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    @contextmanager
    def running(self, trainer: Trainer, start: int) -> Iterator[None]:
        """Begin them, and end those that have begun."""
        with ExitStack() as stack:
            for callback in self._callbacks:
                callback.begin(trainer, start)
                stack.push(lambda kind, error, trace, close=callback.close: close(error))
            yield

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Surround a step."""
        with ExitStack() as stack:
            for callback in self._callbacks:
                stack.enter_context(callback.around(number))
            yield

    def gradients(self, number: int, scale: float) -> None:
        """Show the gradients of a step."""
        for callback in self._callbacks:
            callback.gradients(number, scale)

    def after(self, metrics: StepMetrics) -> StepMetrics:
        """Return the metrics with the figures of all; each is given those of the ones before it."""
        for callback in self._callbacks:
            if figures := callback.after(metrics):
                metrics = metrics.joined(figures, by=type(callback).__name__)
        return metrics


class ModelFlops(Callback):
    """Say which share of the devices' peak the step's model FLOPs are."""

    def begin(self, trainer: Trainer, start: int) -> None:
        recipe, state = trainer.recipe, trainer.state
        peak = recipe.watch.peak_flops or peak_flops(state.device, trainer.step.dtype)
        self.mfu = Mfu(flops_of(recipe, trainer.plan), state.layout.world, peak)

    def after(self, metrics: StepMetrics) -> Mapping[str, Any] | None:
        mfu = self.mfu(metrics.tokens_per_second)
        return None if mfu is None else {"mfu_causal": mfu.causal, "mfu_full": mfu.full}


class StepLines(Callback):
    """Print a line on a step."""

    def begin(self, trainer: Trainer, start: int) -> None:
        self.terminal, self._made, self._start = trainer.terminal, trainer.made, start

    def after(self, metrics: StepMetrics) -> None:
        if metrics.step == self._start:
            seconds = time.monotonic() - self._made
            self.terminal.say(f"first step done {seconds:.1f} s after the start")
        self.terminal.step(metrics)


class Traces(Callback):
    """Write ``traces/step-<n>.rank-<r>.json`` for ``torch.profiler``'s view of each of the recipe's steps,
    from 1, on each of its ranks: a Chrome trace (chrome://tracing, Perfetto).
    """

    def begin(self, trainer: Trainer, start: int) -> None:
        self.steps, self.ranks = trainer.recipe.watch.trace_steps, trainer.recipe.watch.trace_ranks
        self.folder, self.rank = trainer.out / "traces", trainer.state.rank
        self.on_accelerator = accelerator.is_accelerator(trainer.state.device)

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        step = number + 1
        if step not in self.steps or self.rank not in self.ranks:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if self.on_accelerator:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as recorded:
            yield
        self.folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self.folder / f"step-{step:08d}.rank-{self.rank:05d}.json"))


class RunFiles(Callback):
    """Write a run's files on its first rank: ``metrics.jsonl``, and in ``events.jsonl`` how a run begins and
    ends, and each save. Hand the figures to trackers, those of the recipe and ``trackers``, from the first
    step that they do not have.

    ``layout_change_reason``: why the layout is not the recipe's, for the ranks that were left.
    """

    def __init__(self, trackers: Sequence[Tracker], layout_change_reason: str) -> None:
        self.others, self.layout_change_reason = trackers, layout_change_reason
        self._log: StepLog | None = None
        self._trackers: Trackers | None = None

    def begin(self, trainer: Trainer, start: int) -> None:
        recipe, resumed, watch = trainer.recipe, trainer.resumed, trainer.recipe.watch
        self.terminal, self._done, self._goal = trainer.terminal, start, recipe.steps
        plain = recipe.model_dump(mode="json", by_alias=True)
        if trainer.first:
            self._log = StepLog(trainer.out / "metrics.jsonl", start=start)
            if watch.trackers or self.others:
                self._trackers = Trackers(
                    watch.trackers, self.others, trainer.out, project=watch.project,
                    recipe=plain_recipe(plain), start=start, logged=self._log.reached if start else 0,
                    say=self.terminal.say,
                )  # fmt: skip
        self.events = Events(trainer.out / "events.jsonl" if trainer.first else None)
        facts: dict[str, Any] = {
            "layout": str(recipe.layout), "world": recipe.layout.world, "recipe": plain,
            "reached": self._log.reached if self._log else 0,
        }  # fmt: skip
        if self.layout_change_reason:
            facts["fitted"] = self.layout_change_reason
            self.terminal.say(self.layout_change_reason)
        if resumed is None:
            self.events.note("started", start, **facts, weights=recipe.model.init_from)
            return
        before = last_recipe(self.events.path) if self.events.path else {}
        if changes := recipe_changes(before, plain):
            self.terminal.say(f"changed in the recipe since the last start: {'; '.join(changes)}")
        checkpoint, progress = resumed
        self.events.note(
            "resumed", start, **facts, checkpoint=checkpoint.name, written_by=str(progress.layout)
        )

    def note_save(self, line: str) -> None:
        """Print and note what the saver says: which checkpoint is complete, and which ones were deleted."""
        self.terminal.say(line)
        word, _, path = line.partition(" ")
        if word == "COMMITTED":
            name = Path(path).name
            self.events.note("saved", int(name.removeprefix("step-")), checkpoint=name)

    def after(self, metrics: StepMetrics) -> None:
        figures = metrics.line()
        if self._log is not None:
            self._log.write(figures)
        self.track(figures.pop("step") + 1, figures)  # the step is no curve
        self._done = metrics.step + 1

    def track(self, step: int, figures: Mapping[str, Any]) -> None:
        """Hand over to the trackers the numbers known after ``step`` steps."""
        if self._trackers is not None:
            self._trackers.log(step, figures)

    def close(self, error: BaseException | None) -> None:
        try:
            self.events.note_end(error, self._done, goal=self._goal)
        finally:
            for log in (self._log, self._trackers):
                if log is not None:
                    log.close()
