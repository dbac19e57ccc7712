"""Run the pipeline of a step: one of torch's schedules, by its name, over this rank's stages of a model."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed import pipelining

from ..layers import recomputes_operators
from ..parallel_state import ParallelState, engine
from .driver import DrivenStage, StageModule
from .relay import Travels, greet
from .schedule_kinds import check_recomputation, check_schedule, schedule_kind

#: Torch's class of each schedule.
SCHEDULE_CLASSES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}


class Pipeline:
    """Run a step's micro-batches, with ``step``, forward and backward through the stages of all ranks.

    ``name`` is the schedule over this rank's ``stages``, those that ``layout.stages_of`` numbers. Each stage
    of the model gives one tensor like its entry of ``travels``, which the next one takes. The first takes one
    like ``entry``. The last gives the first argument of ``loss(given, target)``, which returns the
    micro-batch's share of the step's loss. ``trains_all``: see ``DrivenStage``.

    Shapes between stages are stated, not found out by a trial run. Raises ``BadInput`` for an unknown name,
    and for micro-batches or stages that the schedule cannot run.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        name: str,
        microbatches: int,
        entry: Travels,
        travels: Sequence[Travels],
        state: ParallelState,
        trains_all: bool = False,
    ) -> None:
        layout = state.layout
        check_schedule(name, layout, microbatches)
        numbers = layout.stages_of(state.at.pipeline)
        assert len(stages) == len(numbers), f"{len(stages)} modules for the stages {numbers}"
        if any(recomputes_operators(module) for stage in stages for module in stage.modules()):
            check_recomputation(name, "selective")
        driven = [
            DrivenStage(
                stage,
                number,
                layout.stages,
                state.device,
                takes=(travels[number - 1] if number else entry).meta(),
                gives=travels[number].meta(),
                group=state.pipeline.group,
                zero=layout.zero,
                trains_all=trains_all,
            )
            for stage, number in zip(stages, numbers, strict=True)
        ]
        several = schedule_kind(name).virtual_stages > 1
        # The loss of a micro-batch is its share of the step's mean, so gradients are summed as they are.
        self._schedule = SCHEDULE_CLASSES[name](
            driven if several else driven[0], microbatches, loss_fn=loss, scale_grads=False
        )
        self._state, self._greeted = state, False
        self._roots = [*dict.fromkeys(root for stage in stages for root in stage.root or ())]

    def step(self, *inputs: Tensor, target: Tensor | None = None, **keywords: Any) -> None:
        """Run one step; collective over the pipeline. Dim 0 of each tensor is cut into the micro-batches.

        ``inputs`` are the model's, on the rank that holds the first stage; ``target`` is the loss function's,
        on the rank with the last; ``keywords`` go to every stage's forward by name. Gradients are in
        ``.grad``, added to what was there, summed over the data ranks.
        """
        if not self._greeted and engine.accelerator.is_accelerator(self._state.device):
            greet(neighbours(self._state), self._state.pipeline.group, self._state.device)
        self._greeted = True
        for root in self._roots:  # gathered weights stay until the end, or with ZeRO 3 while their block runs
            root.set_is_last_backward(False)
            root.set_reshard_after_backward(self._state.layout.zero == 3)
            root.set_requires_gradient_sync(False)
        self._schedule.step(*inputs, target=target, return_outputs=False, **keywords)
        for root in self._roots:  # sum the gradients that are not summed yet, and free all gathered weights
            engine.end_backward(root)


def neighbours(state: ParallelState) -> list[int]:
    """Return the other pipeline ranks whose stages come before or after one of this rank's, in order."""
    layout, here = state.layout, state.at.pipeline
    beside = {number + step for number in layout.stages_of(here) for step in (-1, 1)}
    ranks = {layout.rank_of_stage(number) for number in beside if 0 <= number < layout.stages}
    return sorted(ranks - {here})
