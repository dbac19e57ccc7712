"""Trace the loss of a micro-batch: over the logits, or in chunks over the hidden states."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..layers import chunked_cross_entropy, vocab_parallel_cross_entropy
from ..parallel_state import ParallelState
from .micro_batch import MicroBatch
from .trace import Trace
from .traced import trace
from .without_numbers import DTYPES, empty, ids_of, shapes_only

if TYPE_CHECKING:
    from ..models import CausalLM


def output_of(model: CausalLM) -> nn.Module:
    """Return the module whose weight makes the logits."""
    return model.embed if model.config.tie_word_embeddings else model.head


def loss_trace(model: CausalLM, state: ParallelState, batch: MicroBatch, chunk: int, sums: int) -> Trace:
    """Return the trace of the loss of a micro-batch, in chunks or of all logits at once."""
    size, count = model.config.vocab_size, 1 + len(model.mtp)
    head = output_of(model)

    def run(x: Tensor) -> Tensor:
        labels = ids_of(batch)
        if not chunk:
            labels = labels.repeat(count, 1)
            return vocab_parallel_cross_entropy(x, labels, size, overwrite=True, state=state).sum()
        losses = [
            chunked_cross_entropy(
                part,
                model.head_weight,
                labels,
                size,
                chunk=chunk,
                bias=model.head_bias,
                logit_cap=model.logit_cap,
                sums=DTYPES[sums],
                state=state,
            )
            for part in x.chunk(count)
        ]
        return sum(losses[1:], losses[0])

    with shapes_only([head], batch):
        # The ranks that share the tokens of a row between the blocks.
        cut_over = state.tensor.size if state.sequence and chunk else 1
        width = model.config.embedding_width if chunk else len(model.head_weight)
        make = partial(empty, (batch.rows * count, batch.length // cut_over, width), batch)
        return trace(run, make, [], others=[*head.parameters()], scalar=True)
