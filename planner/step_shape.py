"""Describe a training step of a rank, as far as its memory and its collectives depend on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..layers import Checkpointing
from ..parallel_state import Coordinates, Layout, ParallelState, dtype_named
from ..pipeline.schedule_actions import actions
from ..pipeline.schedule_kinds import schedule_kind
from ..simulation.micro_batch import MicroBatch

if TYPE_CHECKING:
    from ..recipes.recipe import Recipe


@dataclass(frozen=True)
class Work:
    """Describe one step of one model on the rank of ``state``, which may be a stand-in.

    ``hidden``: numbers of a token between the blocks and between two stages. Sizes of numbers are in bytes.
    """

    state: ParallelState
    hidden: int
    sequence_length: int
    micro_batch: int
    micro_batches: int
    schedule: str = "1f1b"
    #: Trained weights and moments; forward and backward; sums of gradients.
    master: int = 4
    compute: int = 4
    reduce: int = 4
    checkpointing: Checkpointing = "none"
    checkpoint_every: int = 2
    #: Tokens whose logits exist at once, 0 for all, kept; bytes in which their weight gradients are summed.
    loss_chunk: int = 0
    loss_sums: int = 4
    offload: bool = False
    #: Whether RMSNorm, dropout and attention that drops are one kernel each (CUDA), or several (a CPU).
    fused: bool = True
    #: Of a user's module: the bytes that each stage of the model gives to the next one for a micro-batch;
    #: without them all give hidden states.
    sent: tuple[int, ...] = ()
    #: Whether every micro-batch gives every trained parameter a gradient, as in the zoo's models.
    trains_all: bool = True

    @cached_property
    def layout(self) -> Layout:
        return self.state.layout

    @cached_property
    def at(self) -> Coordinates:
        return self.state.at

    @cached_property
    def in_two(self) -> bool:
        """Tell whether a backward has two parts."""
        return self.layout.pipeline > 1 and schedule_kind(self.schedule).two_backwards

    def of_pipeline(self, rank: int) -> Work:
        """Return the same step on the first rank of a pipeline rank."""
        return replace(self, state=ParallelState.stand_in(self.layout, self.layout.first_rank(rank)))

    @cached_property
    def batch(self) -> MicroBatch:
        """Return a micro-batch: this rank's piece of each row over the context axis."""
        length = self.sequence_length // self.layout.context
        return MicroBatch(self.micro_batch, length, self.compute, self.fused)

    @property
    def whole(self) -> int:
        """Return the bytes of a micro-batch's hidden states, whole over the tensor axis."""
        return self.batch.count * self.hidden * self.compute

    @cached_property
    def between_blocks(self) -> int:
        """Return the bytes that a block gives to the next one for a micro-batch, and a stage to the next: of
        a user's module the most that a stage gives.
        """
        if self.sent:
            return max(self.sent)
        return self.whole // (self.layout.tensor if self.state.sequence else 1)

    def sent_by(self, stage: int) -> int:
        """Return the bytes that a stage gives to the next one for a micro-batch."""
        return self.sent[stage] if self.sent else self.between_blocks

    # FSDP gathers and sums a group at once: a block, or the root, all parameters that are in no block.

    @cached_property
    def root_stays(self) -> bool:
        """Tell whether the root's weights stay whole from forward to backward with ZeRO 3. In a pipeline they
        do not, because a stage runs other forwards in between, unless the loss is computed in chunks.
        """
        return self.layout.pipeline == 1 or bool(self.loss_chunk)

    def gathers_of_block(self, stage: int, *, reached: bool = True) -> int:
        """Return how often a step gathers the weights of a block in a stage of the pipeline.

        With ZeRO 3 once for each part of the computation: the forward and, if it is ``reached``, the
        backward, or its two parts. The model's first stage has no gradient of an input to compute, so its
        backward is one part anyway.
        """
        if self.layout.zero < 3:
            return int(self.layout.zero > 0)
        if not reached:
            return self.micro_batches
        return 2 * self.micro_batches + (self._backwards_in_two(stage) if self.in_two and stage else 0)

    def gathers_of_root(self, *, reached: bool = True) -> int:
        """Return how often a step gathers the root's weights; with ZeRO 3 the model's first stage and its
        last one do, if the rank holds them. ``reached``: whether a backward comes to the model's first stage.
        """
        if self.layout.zero < 3:
            return int(self.layout.zero > 0)
        stages = self.layout.stages_of(self.at.pipeline)
        # A rank with neither holds no such weights, or a module of one's own, which is one stage.
        stages = tuple(stage for stage in stages if stage in (0, self.layout.stages - 1)) or stages
        if self.root_stays:  # until a backward drops them: each drops what some forward gathered
            return sum(self.micro_batches if reached or stage else 1 for stage in stages)
        return sum(self.gathers_of_block(stage, reached=reached or stage > 0) for stage in stages)

    @cached_property
    def sums(self) -> int:
        """Return how often a step sums the gradients of a group that one stage uses over the ranks that hold
        shards of it.
        """
        return self.micro_batches if self.layout.zero >= 2 else 1

    def sums_of_replicas(self, *, root: bool) -> int:
        """Return how often a step sums the gradients of a group over the replicas of a shard (HSDP): once in
        a step. After every reduce-scatter for the root under a pipeline, and for a model whose micro-batches
        may leave parameters without a gradient.
        """
        return self.sums if (root and self.layout.pipeline > 1) or not self.trains_all else 1

    def _backwards_in_two(self, stage: int) -> int:
        """Return the number of micro-batches whose backward has two parts on a stage: all of them, or in
        DualPipeV as many as in its shortest step.
        """
        layout, few = self.layout, schedule_kind(self.schedule).least_micro_batches(self.layout.pipeline)
        orders = actions(self.schedule, layout.pipeline, layout.virtual_stages, layout.v_shape, few)
        in_two = sum(action.kind == "I" and action.stage == stage for action in orders[self.at.pipeline])
        return self.micro_batches if in_two == few else in_two


def sizes_of(recipe: Recipe) -> dict[str, Any]:
    """Return the sizes of numbers that a recipe's step computes with, and whose kernels run."""
    sums = dtype_named(recipe.reduce).itemsize if recipe.reduce else None
    master = dtype_named(recipe.dtype).itemsize
    return {
        "master": master,
        "compute": dtype_named(recipe.compute_dtype).itemsize,
        "reduce": sums or master,
        "loss_sums": sums or 4,
        "fused": recipe.device == "cuda",
    }
