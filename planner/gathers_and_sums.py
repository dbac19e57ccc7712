"""Count how often a step gathers the weights of a group, and sums its gradients, over the data axes.

A group is what FSDP gathers at once: a block, or the ``root``, all parameters that are in no block.
"""

from collections.abc import Sequence

from ..pipeline.schedule_actions import Action, actions
from ..pipeline.schedule_kinds import schedule_kind
from .step_shape import Work


def root_stays(work: Work) -> bool:
    """Tell whether the root's weights stay whole from forward to backward with ZeRO 3. In a pipeline they do
    not, because a stage runs other forwards in between, unless the loss is computed in chunks.
    """
    return work.layout.pipeline == 1 or bool(work.loss_chunk)


def gathers_of_block(work: Work, stage: int, *, reached: bool = True) -> int:
    """Return how often a step gathers the weights of a block in a stage of the pipeline.

    With ZeRO 3 once for each part of the computation: the forward and, if it is ``reached``, the backward, or
    its two parts. The model's first stage has no gradient of an input to compute, so its backward is one part
    anyway.
    """
    if work.layout.zero < 3:
        return int(work.layout.zero > 0)
    if not reached:
        return work.micro_batches
    return 2 * work.micro_batches + (0 if stage == 0 else _backwards_in_two(work, stage))


def gathers_of_root(work: Work, *, reached: bool = True) -> int:
    """Return how often a step gathers the root's weights; with ZeRO 3 the model's first stage does, and the
    last one, if the rank holds them. ``reached``: whether a backward comes to the model's first stage.
    """
    if work.layout.zero < 3:
        return int(work.layout.zero > 0)
    stages = work.layout.stages_of(work.at.pipeline)
    # A rank with neither holds no such weights, or a module of one's own, which is one stage.
    stages = tuple(stage for stage in stages if stage in (0, work.layout.stages - 1)) or stages
    if root_stays(work):  # until a backward drops them: each drops what some forward gathered
        return sum(work.micro_batches if reached or stage else 1 for stage in stages)
    return sum(gathers_of_block(work, stage, reached=reached or stage > 0) for stage in stages)


def sums(work: Work) -> int:
    """Return how often a step sums the gradients of a group that one stage uses over the ranks that hold
    shards of it.
    """
    return work.micro_batches if work.layout.zero >= 2 else 1


def sums_of_replicas(work: Work, *, root: bool) -> int:
    """Return how often a step sums the gradients of a group over the replicas of a shard (HSDP): once in a
    step. After every reduce-scatter for the root under a pipeline, and for a model whose micro-batches may
    leave parameters without a gradient.
    """
    each = (root and work.layout.pipeline > 1) or not work.trains_all
    return sums(work) if each else 1


def _backwards_in_two(work: Work, stage: int) -> int:
    """Return the number of micro-batches whose backward has two parts on a stage: all of them, or in
    DualPipeV as many as in its shortest step.
    """
    if not work.in_two:
        return 0
    order, few = _shortest(work)
    micro_batches = sum(action.kind == "I" and action.stage == stage for action in order)
    return work.micro_batches if micro_batches == few else micro_batches


def _shortest(work: Work) -> tuple[Sequence[Action], int]:
    """Return what the rank does in the shortest step of its schedule, and the micro-batches of this step."""
    layout = work.layout
    few = schedule_kind(work.schedule).least_micro_batches(layout.pipeline)
    orders = actions(work.schedule, layout.pipeline, layout.virtual_stages, layout.v_shape, few)
    return orders[work.at.pipeline], few
