"""Watch a run without changing it: one object with all measurements, for the trainer to call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..checkpoints import Progress
from ..parallel_state import ParallelState
from ..planner.flops import Mfu, peak_flops
from ..recipes.recipe import Recipe
from ..runs.events import Events
from ..runs.memory_use import memory_used
from ..runs.metrics import StepLog, StepMetrics, steps_in
from ..runs.profiler import Traces
from ..runs.recipe_changes import plain_recipe, recipe_changes
from ..runs.terminal import Terminal
from ..runs.trackers import Tracker, Trackers
from .build import Parts
from .evaluation import Evaluator, perplexity
from .parameter_norms import Activations, Norms
from .run_plan import RunPlan, flops_of
from .stragglers import Stragglers


class Watchers:
    """Measure and log: metrics, evaluation, norms, traces, events of one rank.

    The trainer calls, on every rank: ``began``; inside ``running`` for each step ``around`` it, ``gradients``
    once they are whole and before they are clipped, ``after`` the update. ``at(phase, step)`` is told of long
    phases. ``fitted`` is a line about a layout that was chosen for the ranks that were left.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: RunPlan,
        parts: Parts,
        state: ParallelState,
        terminal: Terminal,
        at: Callable[[str, int], None],
        trackers: Sequence[Tracker] = (),
        fitted: str = "",
    ) -> None:
        self.recipe, self.state, self.terminal, self.at = recipe, state, terminal, at
        self.fitted = fitted
        self.out, self.first = Path(recipe.out), state.rank == 0
        watch, model, dtype = recipe.watch, parts.model, parts.step.dtype
        self.events = Events(self.out / "events.jsonl" if self.first else None)
        peak = watch.peak_flops or peak_flops(state.device, dtype)
        self.mfu = Mfu(flops_of(recipe, plan), state.layout.world, peak)
        self.evaluate = None
        if plan.held_out is not None:
            self.evaluate = Evaluator(parts.step, plan.held_out)
        links = plan.family.links_of_all(plan.config)
        self.norms = Norms(model, links) if watch.norms else None
        self.activations = Activations(model, links) if watch.norms and watch.activation_norms else None
        self.traces = Traces(
            self.out / "traces", steps=watch.trace_steps, ranks=watch.trace_ranks, rank=state.rank
        )
        self.stragglers = Stragglers(
            state, every=recipe.log_every, times=watch.slow_rank, compiled=recipe.compiles
        )
        self._measured: dict[str, dict[str, float]] = {}
        self._metrics: StepLog | None = None
        self._norms: StepLog | None = None
        self._given = trackers
        self._trackers: Trackers | None = None

    def began(self, step: int, *, checkpoint: Path | None = None, progress: Progress | None = None) -> None:
        """Note that the run begins, or continues from a checkpoint, perhaps of another layout."""
        recipe = self.recipe
        facts: dict[str, Any] = {
            "layout": str(recipe.layout),
            "world": recipe.layout.world,
            "recipe": recipe.model_dump(mode="json", by_alias=True),
        }
        if self.fitted:
            facts["fitted"] = self.fitted
            self.terminal.say(self.fitted)
        if checkpoint is None or progress is None:
            self.events.note("started", step, **facts, weights=recipe.model.init_from)
        else:
            if changes := self.events.path and recipe_changes(self.events.path, facts["recipe"]):
                self.terminal.say(f"changed in the recipe since the last start: {'; '.join(changes)}")
            written = {"checkpoint": checkpoint.name, "written_by": str(progress.layout)}
            self.events.note("resumed", step, **facts, **written)

    def of_saving(self, line: str) -> None:
        """Print and log what the saver says: which checkpoint is complete, and which ones were deleted."""
        self.terminal.say(line)
        word, _, path = line.partition(" ")
        if word == "COMMITTED":
            name = Path(path).name
            self.events.note("saved", int(name.removeprefix("step-")), checkpoint=name)

    @contextmanager
    def running(self, start: int) -> Iterator[None]:
        """Keep the logs open, and note how the run ends."""
        with ExitStack() as stack:
            if self.first:
                logged = steps_in(self.out / "metrics.jsonl") if start else 0
                self._metrics = StepLog(self.out / "metrics.jsonl", start=start)
                stack.callback(self._metrics.close)
            if self.first and self.norms is not None:
                self._norms = StepLog(self.out / "norms.jsonl", start=start)
                stack.callback(self._norms.close)
            if self.first and (self._given or self.recipe.watch.trackers):
                self._trackers = self._start_trackers(start, logged)
                stack.callback(self._trackers.close)
            self._done = stack.enter_context(self.events.until_the_end(self.recipe.steps))
            self._done[0] = start
            yield

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Wrap step ``number``, from 0: forward, backward and update."""
        if self._norms_due(number) and self.activations is not None:
            self.activations.begin()
        with self.traces.around(number + 1), self.stragglers.around(number):
            yield

    def gradients(self, number: int, scale: float) -> None:
        """Measure the gradients of ``scale`` times the loss, whole and not yet clipped."""
        if self._norms_due(number) and self.norms is not None:
            norms = self.norms.gradients()
            self._measured["gradients"] = {name: norm / scale for name, norm in norms.items()}

    @property
    def memory(self) -> int:
        """Return the bytes that this rank uses."""
        return memory_used(self.state.device)

    def after(self, metrics: StepMetrics, memory: int) -> StepMetrics:
        """Return the step's metrics, evaluation included, after writing them. ``memory``: the most of any
        rank.
        """
        number = metrics.step
        mfu = self.mfu(metrics.tokens_per_second)
        if mfu is not None:
            metrics = replace(metrics, mfu_causal=mfu.causal, mfu_full=mfu.full)
        metrics = replace(metrics, memory=memory)
        if slow := self.stragglers.slowest(metrics.seconds):
            metrics = replace(metrics, slow_rank=slow.rank, slow_host=slow.host, slow_times=slow.times)
        self.terminal.step(metrics)
        if self._norms_due(number):
            self._log_norms(number)
        if self.evaluate is not None and self._evaluation_due(number):
            self.at("evaluation", number + 1)
            loss = self.evaluate()
            metrics = replace(metrics, evaluation_loss=loss, evaluation_perplexity=perplexity(loss))
            self.terminal.evaluation(metrics)
        if self._metrics is not None:
            self._metrics.write(asdict(metrics))
        if self._trackers is not None:
            figures = asdict(metrics)
            del figures["step"]  # not a curve
            self._trackers.log(number + 1, figures)
        self._done[0] = number + 1
        return metrics

    def _start_trackers(self, start: int, logged: int) -> Trackers:
        watch, recipe = self.recipe.watch, self.recipe.model_dump(mode="json", by_alias=True)
        return Trackers(
            watch.trackers, self._given, self.out,
            project=watch.project, recipe=plain_recipe(recipe), start=start, logged=logged,
            say=self.terminal.say,
        )  # fmt: skip

    def _log_norms(self, number: int) -> None:
        assert self.norms is not None
        self._measured["weights"] = self.norms.weights()
        if self.activations is not None:
            self._measured["activations"] = self.activations.end()
        if self._norms is not None:
            self._norms.write({"step": number, **self._measured})
        if self._trackers is not None:
            for kind, norms in self._measured.items():
                figures = {f"norms/{kind}/{name}": value for name, value in norms.items()}
                self._trackers.log(number + 1, figures)
        self._measured = {}

    def _norms_due(self, number: int) -> bool:
        every = self.recipe.watch.norms
        return bool(every) and (number + 1) % every == 0

    def _evaluation_due(self, number: int) -> bool:
        section = self.recipe.evaluation
        return section is not None and ((number + 1) % section.every == 0 or number + 1 == self.recipe.steps)
