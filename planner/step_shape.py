"""Describe a training step of a rank, as far as its memory and its collectives depend on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..layers import Checkpointing
from ..parallel_state import Coordinates, Layout, ParallelState, dtype_named
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

    @property
    def layout(self) -> Layout:
        return self.state.layout

    @property
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

    @property
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
