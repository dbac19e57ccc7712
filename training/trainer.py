"""Train a run: build the model in its layout, start or resume, step, log, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoints import (
    Contents,
    Progress,
    Saver,
    begin_moments,
    load_model_source,
    load_training,
    newest_checkpoint,
    restore_if_none,
)
from ..data.batch import Batch, BatchParts
from ..data.micro_batches import MicroBatches
from ..layers import attention_backends
from ..parallel_state import CollectiveOrder, NotTrained, ParallelState, fault, initialize, seed_of
from ..parallel_state.engine import accelerator
from ..recipes.recipe import Recipe
from ..runs.guard import last_word
from ..runs.heartbeat import Heartbeat
from ..runs.metrics import StepMetrics
from ..runs.stop_signals import Preempted, StopSignals, why_stopped
from ..runs.switches import KILL, SAVE, STOP, Killed, Switches
from ..runs.terminal import Terminal
from ..runs.trackers import Tracker
from ..system import search_garbage_when_told
from .adamw import set_learning_rate
from .build import build, schedule_of
from .lora import first_adapters
from .not_finite import name_the_culprit
from .progress_checks import check_progress, sample_order
from .run_plan import RunPlan, agree_on_weights, check_run
from .watchers import Watchers

#: Steps between two searches for garbage among all objects. After each step only new objects are looked at.
GARBAGE_EVERY = 100


class Trainer:
    """Train one rank's part of a run. Collective: every rank makes one and calls ``run``.

    ``plan``: the result of ``check_run(recipe)`` in this process, if there is one already. ``beat`` and
    ``signals`` belong to a supervised run, which ``training.run`` sets up. ``trackers``: as there.
    ``fitted``: why the layout is not the recipe's, for the run's record.
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
        fitted: str = "",
    ) -> None:
        self.recipe, self.state = recipe, state
        self.plan = agree_on_weights(plan or check_run(recipe), recipe, state)
        self.out, self._made = Path(recipe.out), time.monotonic()
        self.beat, self.signals = beat, signals or StopSignals()
        self.first = state.rank == 0
        self.switches = Switches(self.out, here=self.first)
        self.terminal = Terminal(
            steps=recipe.steps, every=recipe.log_every, stop=recipe.stop_after, quiet=quiet or not self.first
        )
        self.micro_batches = MicroBatches(
            self.plan.batches,
            state,
            micro_batch=recipe.data.micro_batch,
            vocab_size=self.plan.config.vocab_size,
        )
        parts = build(recipe, self.plan, state)
        self.model, self.optimizer, self.step = parts.model, parts.optimizer, parts.step
        self.update, self.schedule = parts.update, parts.schedule
        if as_before := parts.as_before:
            some = ", ".join(as_before[:3]) + (", ..." if len(as_before) > 3 else "")
            self.terminal.say(
                f"float8: {len(as_before)} weights stay in bfloat16 (a side is no multiple of 16): {some}"
            )
        self.watchers = Watchers(recipe, self.plan, parts, state, self.terminal, self._at, trackers, fitted)

    def run(self, after_step: Callable[[StepMetrics], None] = lambda metrics: None) -> None:
        """Train from the newest complete checkpoint, or from the start, to the last step.

        ``after_step`` is given each step's metrics, of which nothing is kept: ``metrics.jsonl`` has them all.
        A signal that ``signals`` noted, or the file ``stop`` in the run's folder, ends the run after the
        current step, with a checkpoint: raises ``Preempted``. If a rank has a loss or gradient that is not
        finite, or a parameter without a gradient, all ranks stop before the update: raises ``PeerFailed``;
        with float16 they skip the step together.
        """
        for name in (STOP, SAVE, KILL):
            self.switches.off(name)  # meant for an earlier start
        start = self._start()
        stop = min(self.recipe.steps, self.recipe.stop_after or self.recipe.steps)
        if start >= stop:
            done_so_far = f"step {start} of {self.recipe.steps} is done"
            until = "" if stop == self.recipe.steps else f", and stop_after is {stop}"
            self.terminal.say(f"nothing left to do: {done_so_far}{until}")
        with (
            search_garbage_when_told() as search_garbage,
            self._comparing(),
            self.watchers.running(start),
            self.micro_batches.running(start, stop, ahead=self.recipe.data.prefetch) as batch_of,
            self._saver() as saver,
            self._said_at_once(),
        ):
            for number in range(start, stop):
                with self.watchers.around(number):
                    metrics = self._one_step(number, batch_of)
                if number == start:
                    self.terminal.say(
                        f"first step done {time.monotonic() - self._made:.1f} s after the start"
                    )
                stop_requested, failed, memory, save, kill = self._most_of_any_rank(
                    self.signals.asked(self.state.rank) or self.switches.on(STOP),
                    saver.failed,
                    self.watchers.memory,
                    self.switches.on(SAVE),
                    self.switches.on(KILL),
                )
                search_garbage(number == start or (number + 1) % GARBAGE_EVERY == 0)
                after_step(self.watchers.after(metrics, memory))
                if failed:
                    saver.wait()
                saver.poll()
                if kill:
                    self.switches.off(KILL)
                    raise Killed(f"ended after step {number + 1} by the file {self.out / KILL}")
                every = self.recipe.checkpoint.every
                due = bool(every) and (number + 1) % every == 0
                if number + 1 == stop or stop_requested or save or due:
                    self._at("save", number + 1)
                    order = sample_order(self.recipe, self.plan)
                    saver.save(Progress(number + 1, self.state.layout, order, self.update.remember()))
                    self.switches.off(SAVE)
                if stop_requested and number + 1 < stop:
                    saver.wait()
                    self.switches.off(STOP)
                    why = why_stopped(stop_requested)
                    raise Preempted(
                        f"{why}: saved after step {number + 1}; the same command goes on from there"
                    )

    def _said_at_once(self) -> AbstractContextManager[None]:
        """Write an error to this rank's status before the saver waits for a save in the background."""
        return nullcontext() if self.beat is None else last_word(self.beat)

    def _comparing(self) -> AbstractContextManager[Any]:
        """Return the context that compares the order of collectives, if the recipe asks for it."""
        debug, timeout = self.recipe.debug, timedelta(seconds=self.recipe.timeout)
        if not debug.collectives or self.state.layout.world == 1:
            return nullcontext()
        return CollectiveOrder(self.state, every=debug.every or 1, timeout=timeout)

    def _saver(self) -> Saver:
        return Saver(
            self.checkpoints,
            self.model,
            self.optimizer,
            Contents(
                self.plan.family,
                self.plan.config,
                self.plan.hf_config,
                self.plan.split,
                self.plan.companions,
                adapter=self.plan.adapter,
                frozen=frozenset(name for name, group in self.plan.groups.items() if group.freeze),
            ),
            keep=self.recipe.checkpoint.keep,
            background=self.recipe.checkpoint.background,
            mirror=self.recipe.checkpoint.mirror,
            said=self.watchers.of_saving,
        )

    def _most_of_any_rank(self, *numbers: int) -> list[int]:
        """Return the largest of each number over all ranks, so that all act after the same step.

        Signals and errors reach ranks at different moments. The group of the files is not used: a save in the
        background may be using it.
        """
        if self.state.layout.world == 1:
            return [*numbers]
        seen = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return [int(number) for number in seen]

    def _start(self) -> int:
        """Resume if there is a checkpoint, else load or draw the first weights; return the first step."""
        if said := schedule_of(self.recipe)[1]:
            self.terminal.say(said)
        if self.plan.split is not None:
            self.terminal.say(f"stages: {self.plan.cut}")
        if self.plan.attention:
            chosen = attention_backends(self.plan.attention, self.recipe.attention_backend, self.state)
            words = "; ".join(f"{kind}: {backend}" for kind, backend in chosen.items())
            self.terminal.say(f"attention over {words}")
        if self.recipe.compile == "auto" and accelerator.has_compiled_losses(self.state.device):
            reason = self.recipe.not_compiled
            self.terminal.say(
                "blocks are compiled" if reason is None else f"blocks are not compiled: {reason}"
            )
        saving = self.recipe.checkpoint
        if saving.restore and saving.mirror is not None:
            restore_if_none(saving.mirror, self.checkpoints, self.state, say=self.terminal.say)
        newest = newest_checkpoint(self.checkpoints, self.state, say=self.terminal.say)
        plan, lora = self.plan, self.recipe.lora
        source, say = plan.source, self.terminal.say
        if lora is not None and source is not None:
            seed, state, resuming = self.recipe.seed, self.state, newest is not None
            first_adapters(
                lora, source, plan.family, self.model, seed, state=state, resuming=resuming, say=say
            )
        if newest is not None:
            plan.let_go()
            progress = load_training(
                newest, self.model, self.optimizer, plan.family, plan.config, adapter=plan.adapter
            )
            check_progress(self.recipe, plan, newest, progress, say=self.terminal.say)
            self.update.restore(progress.memory)
            self.terminal.say(f"resumed from {newest} (written by {progress.layout})")
            self.watchers.began(progress.step, checkpoint=newest, progress=progress)
            return progress.step
        if lora is None and source is not None:
            load_model_source(source, self.model, plan.family, plan.config)
            say(f"weights from {self.recipe.model.init_from}")
        elif lora is None:
            initialize(self.model, self.recipe.seed, state=self.state)
        plan.let_go()
        begin_moments(self.model, self.optimizer)
        self.watchers.began(0)
        return 0

    def _one_step(self, number: int, batch_of: Callable[[int], Batch | BatchParts]) -> StepMetrics:
        recipe, state = self.recipe, self.state
        began = time.perf_counter()
        self._at("step", number + 1)
        torch.manual_seed(random_seed(recipe.seed, number, state))
        batch = batch_of(number)
        lr = self.schedule.rate(number)
        set_learning_rate(self.optimizer, lr)
        fault("step.forward", rank=state.rank, step=number + 1)
        scale = self.update.scale
        try:
            result = self.step.launch(batch, scale=scale)
            self.watchers.gradients(number, scale)
            updated = self.update(result)
        except NotTrained as error:
            raise NotTrained(f"step {number + 1}: {error}") from error
        if updated.fatal:
            torch.manual_seed(random_seed(recipe.seed, number, state))
            name_the_culprit(self.step, number + 1, self.micro_batches.batch(number))
        seconds = time.perf_counter() - began
        tokens, even = recipe.data.global_batch * recipe.data.sequence_length, updated.balance
        return StepMetrics(
            number,
            updated.loss,
            updated.grad_norm,
            lr,
            tokens,
            tokens / seconds,
            seconds,
            skipped=updated.skipped,
            skips=self.update.skipped,
            loss_scale=scale if self.update.loss_scale else None,
            balance_loss=even.balance if even else None,
            router_z_loss=even.z_loss if even else None,
            expert_load=even.load if even else None,
        )

    def _at(self, phase: str, step: int) -> None:
        if self.beat is not None:
            self.beat.at(phase, step)

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"


def random_seed(seed: int, step: int, state: ParallelState) -> int:
    """Return the seed of a step's dropout masks: equal on the ranks of one tensor group, otherwise different.

    A resumed run draws the same masks, and there is no random state to save.
    """
    piece = state.data_index * state.context_size + state.context_index
    return seed_of(seed, "step", step, piece, state.at.pipeline)
