"""What a rank does in a step, as far as its memory depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from ..layers import Checkpointing
from ..models import ModelConfig
from ..parallel_state import Layout


@dataclass(frozen=True)
class Work:
    """One step of one model in one layout. Sizes of numbers are in bytes."""

    config: ModelConfig
    layout: Layout
    sequence_length: int
    micro_batch: int
    micro_batches: int
    schedule: str = "1f1b"
    #: Weights and moments; forward and backward; sums of gradients.
    master: int = 4
    #: Weights that are not trained.
    frozen: int = 4
    compute: int = 4
    reduce: int = 4
    checkpointing: Checkpointing = "none"
    checkpoint_every: int = 2
    loss_chunk: int = 0
    offload: bool = False
    #: Whether the input of LoRA's adapters is dropped in part.
    adapter_dropout: bool = False
    #: Whether RMSNorm, dropout and attention that drops are one kernel each (CUDA), or several (a CPU).
    fused: bool = True

    @property
    def length(self) -> int:
        """Of a row, on this rank's piece of it over the context axis, before tensor ranks split that."""
        return self.sequence_length // self.layout.context

    @property
    def tokens(self) -> int:
        """Of a micro-batch, as many of each row as ``length`` says."""
        return self.micro_batch * self.length

    @property
    def inner(self) -> int:
        """Bytes of a number in the loss: at least fp32."""
        return max(self.compute, 4)

    @property
    def mask(self) -> int:
        """Bytes of a number's mask in dropout: a fused one keeps a byte."""
        return 1 if self.fused else self.compute
