"""Train a run: build the model in its layout, start or resume, step, log, save."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import Progress, Saver, begin_moments, load, newest_of_run, restore_if_none
from ..data.batches import MicroBatches
from ..parallel_state import (
    CollectiveOrder,
    NotTrained,
    ParallelState,
    PeerFailed,
    fault,
    initialize,
    seed_of,
)
from ..parallel_state.engine import accelerator
from ..recipes.recipe import Recipe
from ..runs.guard import report_error_before_cleanup
from ..runs.heartbeat import Heartbeat
from ..runs.launch import device_words
from ..runs.lock import LockWatch
from ..runs.metrics import StepMetrics, memory_used
from ..runs.requests import Killed, Preempted, Requests, StopSignals, Switches, agree_on_requests, why_stopped
from ..runs.terminal import Terminal
from ..runs.trackers import Tracker
from ..system import counted, manual_gc
from .build import build, choices, measurements
from .callbacks import Callback, Callbacks, RunFiles
from .learning_rate import schedule_of
from .lora import first_adapters
from .not_finite import find_first_non_finite
from .optimizer import set_learning_rate
from .progress_checks import check_progress, check_ranks_alike, contents_of_run, identity_of_run
from .run_data import separate_padding
from .run_plan import RunPlan, agree_on_weights, check_run
from .step_sums import StepResult
from .update import Updated

#: Steps between two searches for garbage among all objects. After each step only new objects are looked at.
GARBAGE_EVERY = 100


class Trainer:
    """Train one rank's part of a run. Collective: every rank makes one and calls ``run``.

    ``plan``: the result of ``check_run(recipe)`` in this process, if there is one already. ``beat`` and
    ``signals`` belong to a supervised run, which ``training.run`` sets up. ``trackers`` and ``callbacks``: as
    there. ``layout_change_reason``: why the layout is not the recipe's, for the run's record.
    """

    def __init__(
        self,
        recipe: Recipe,
        state: ParallelState,
        plan: RunPlan | None = None,
        *,
        beat: Heartbeat | None = None,
        signals: StopSignals | None = None,
        quiet: bool = False,
        trackers: Sequence[Tracker] = (),
        callbacks: Sequence[Callback] = (),
        layout_change_reason: str = "",
    ) -> None:
        if recipe.device == "auto":
            recipe = recipe.on("cuda" if accelerator.is_accelerator(state.device) else "cpu")
        self.recipe, self.state = recipe, state
        self.plan = agree_on_weights(plan or check_run(recipe), recipe, state)
        check_ranks_alike(recipe, self.plan, state)
        self.out, self.made = Path(recipe.out), time.monotonic()
        self.beat, self.signals = beat, signals or StopSignals()
        self.first = state.rank == 0
        self.switches = Switches(self.out, here=self.first)
        stop, quiet = recipe.stop_after, quiet or not self.first
        self.terminal = Terminal(steps=recipe.steps, interval=recipe.log_every, stop=stop, quiet=quiet)
        self.terminal.say(f"device: {device_words(recipe.device)}")
        self.micro_batches = MicroBatches(
            self.plan.batches,
            state,
            micro_batch=recipe.data.micro_batch,
            vocab_size=self.plan.config.vocab_size,
            named=self.plan.own is not None,
        )
        self.step, self.update, names = build(recipe, self.plan, state)
        self.model: Any = self.step.model
        held_out = None if self.plan.held_out is None else self.plan.held_out.batches
        separate_padding(self.model, self.plan.batches, held_out)
        self.optimizer, self.schedule = self.update.optimizer, schedule_of(recipe)[0]
        if names:
            examples = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            self.terminal.say(
                f"float8: {counted(len(names), 'weight')} in bfloat16 (a side is no multiple of 16): "
                f"{examples}"
            )
        #: The checkpoint from which the run goes on, and what it states of its run.
        self.resumed: tuple[Path, Progress] | None = None
        self.files = RunFiles(trackers, layout_change_reason)
        self.callbacks = Callbacks([*measurements(recipe, self.plan), *callbacks, self.files])

    def run(self, after_step: Callable[[StepMetrics], None] = lambda metrics: None) -> None:
        """Train from the newest complete checkpoint, or from the start, to the last step.

        ``after_step`` is given each step's metrics, of which nothing is kept: ``metrics.jsonl`` has them all.
        A signal that ``signals`` noted, or the file ``stop`` in the run's folder, ends the run after the
        current step, with a checkpoint: raises ``Preempted``. If a rank has a loss or gradient that is not
        finite, or a parameter without a gradient, all ranks stop before the update: raises ``PeerFailed``;
        with float16 they skip the step together.
        """
        for name in Switches.names:
            self.switches.off(name)  # meant for an earlier start
        start = self._start()
        self.at("start", start)
        stop = min(self.recipe.steps, self.recipe.stop_after or self.recipe.steps)
        with (
            manual_gc() as collect_garbage,
            self._comparing(),
            self.callbacks.running(self, start),
            self.micro_batches.running(start, stop, ahead=self.recipe.data.prefetch) as batches,
            LockWatch(self.out, holder=self.first) as lock,
            self._saver(start) as saver,
            nullcontext() if self.beat is None else report_error_before_cleanup(self.beat),
        ):
            if start >= stop:
                until = "" if stop == self.recipe.steps else f", and stop_after is {stop}"
                self.terminal.say(f"nothing left to do: step {start} of {self.recipe.steps} is done{until}")
            for number in range(start, stop):
                with self.callbacks.around(number), self._timing(number):
                    batch = self._batch(number, batches)
                    result = self._gradients(number, batch)
                    updated = self._update(number, result)
                requests, memory = agree_on_requests(
                    self.signals, self.switches, self.state,
                    failed=saver.failed, lost=lock.lost(), memory=memory_used(self.state.device),
                )  # fmt: skip
                collect_garbage(number == start or (number + 1) % GARBAGE_EVERY == 0)
                after_step(self._note(number, updated, memory))
                self._act_on(requests, number + 1, stop, saver)

    @contextmanager
    def _timing(self, number: int) -> Iterator[None]:
        """Note the seconds of a step, and tell its number with an error."""
        began = time.perf_counter()
        try:
            yield
        except NotTrained as error:
            raise NotTrained(f"step {number + 1}: {error}") from error
        self._seconds = time.perf_counter() - began

    def _batch(self, number: int, batches: Iterator[Any]) -> Any:
        """Return a step's batch, with the random numbers and the learning rate of this step set."""
        self.at("step", number + 1)
        torch.manual_seed(random_seed(self.recipe.seed, number, self.state))
        batch = next(batches)
        set_learning_rate(self.optimizer, self.schedule.rate(number))
        return batch

    def _gradients(self, number: int, batch: Any) -> StepResult:
        """Run forward and backward; the gradients are then whole, and not yet clipped."""
        fault("step.forward", rank=self.state.rank, step=number + 1)
        scale = self.update.scale
        result = self.step.launch(batch, scale=scale)
        self.callbacks.gradients(number, scale)
        return result

    def _update(self, number: int, result: StepResult) -> Updated:
        """Update the weights; name the module at fault if loss or gradients are not finite."""
        updated = self.update(result)
        if updated.fatal:
            torch.manual_seed(random_seed(self.recipe.seed, number, self.state))
            find_first_non_finite(self.step, number + 1, self.micro_batches.batch(number))
        return updated

    def _note(self, number: int, updated: Updated, memory: int) -> StepMetrics:
        """Return the step's metrics after the callbacks have joined theirs, and logged them."""
        tokens = self.recipe.data.global_batch * self.recipe.data.sequence_length
        balance = updated.balance
        metrics = StepMetrics(
            number,
            updated.loss,
            updated.grad_norm,
            self.schedule.rate(number),
            tokens,
            tokens / self._seconds,
            self._seconds,
            memory=memory,
            skipped=updated.skipped,
            skips=self.update.skipped,
            loss_scale=updated.loss_scale,
            balance_loss=balance.balance if balance else None,
            router_z_loss=balance.z_loss if balance else None,
            expert_load=balance.load if balance else None,
        )
        return self.callbacks.after(metrics)

    def _act_on(self, requests: Requests, done: int, stop: int, saver: Saver) -> None:
        """Save, stop or end after ``done`` steps if that was asked for, or its turn has come."""
        if requests.lost:
            raise PeerFailed(f"{self.out}: removed while the run went on, and another run may have it now")
        if requests.failed:
            saver.wait()
        saver.poll()
        if requests.kill:
            self.switches.off(Switches.kill)
            raise Killed(f"ended after step {done} by the file {self.out / Switches.kill}")
        interval = self.recipe.checkpoint.every
        due = bool(interval) and done % interval == 0
        if done == stop or requests.stop or requests.save or due:
            self.at("save", done)
            identity = identity_of_run(self.recipe, self.plan)
            saver.save(Progress(done, self.state.layout, identity, self.update.remember()))
            self.switches.off(Switches.save)
        if requests.stop and done < stop:
            saver.wait()
            self.switches.off(Switches.stop)
            why = why_stopped(requests.stop)
            raise Preempted(f"{why}: saved after step {done}; the same command goes on from there")

    def _comparing(self) -> AbstractContextManager[Any]:
        """Return the context that compares the order of collectives, if the recipe asks for it."""
        debug, timeout = self.recipe.debug, timedelta(seconds=self.recipe.timeout)
        if not debug.collectives or self.state.layout.world == 1:
            return nullcontext()
        return CollectiveOrder(self.state, interval=debug.every or 1, timeout=timeout)

    def _saver(self, start: int) -> Saver:
        saving = self.recipe.checkpoint
        return Saver(
            self.checkpoints,
            self.model,
            self.optimizer,
            contents_of_run(self.plan, self.model, self.state),
            state=self.state,
            keep=saving.keep,
            start=start,
            background=saving.background,
            mirror=saving.mirror,
            say=self.files.note_save,
        )

    def _start(self) -> int:
        """Resume if there is a checkpoint, else load or draw the first weights; return the first step."""
        recipe, plan, say = self.recipe, self.plan, self.terminal.say
        for line in choices(recipe, plan, self.state):
            say(line)
        saving = recipe.checkpoint
        if saving.restore and saving.mirror is not None:
            restore_if_none(saving.mirror, self.checkpoints, self.state, say=say)
        newest = newest_of_run(self.checkpoints, self.state, say=say)
        if recipe.lora is not None:
            first_adapters(self, resuming=newest is not None)
        if newest is not None:
            plan.let_go()
            progress = load(newest, self.model, self.optimizer, state=self.state)
            check_progress(recipe, plan, newest, progress, say=say)
            self.update.restore(progress.memory)
            say(f"resumed from {newest} (written by {progress.layout})")
            self.resumed = (newest, progress)
            return progress.step
        weights = plan.source or recipe.model.init_from
        if recipe.lora is None and weights is not None:
            load(weights, self.model, state=self.state)
            say(f"weights from {recipe.model.init_from}")
        elif recipe.lora is None:
            initialize(self.model, recipe.seed, state=self.state)
        plan.let_go()
        begin_moments(self.model, self.optimizer)
        return 0

    def at(self, phase: str, step: int) -> None:
        """Note in the heartbeat that a phase begins: it may be silent for long."""
        if self.beat is not None:
            self.beat.at(phase, step)

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"


def random_seed(seed: int, step: int, state: ParallelState) -> int:
    """Return the seed of a step's dropout masks: equal on the ranks of one tensor group, otherwise different.

    A resumed run draws the same masks, and there is no random state to save.
    """
    piece = state.data_index * state.context.size + state.context.index
    return seed_of(seed, "step", step, piece, state.at.pipeline)
