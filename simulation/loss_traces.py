"""Trace the loss of a micro-batch, which takes chunks and rows one after the other, from fewer of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import lcm
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..layers import chunked_cross_entropy, vocab_parallel_cross_entropy
from ..layers.loss import LossTerms, rows_at_once
from ..parallel_state import ParallelState
from .micro_batch import MicroBatch
from .trace import Trace, of_more_rounds
from .traced import trace
from .without_numbers import DTYPES, empty, ids_of, shapes_only

if TYPE_CHECKING:
    from ..models import CausalLM

#: The fewest rounds, beside what is left over, that are traced.
_FEW_ROUNDS = 3


def output_of(model: CausalLM) -> nn.Module:
    """Return the module whose weight makes the logits."""
    return model.embed if model.config.tie_word_embeddings else model.head


class LossTraces:
    """Remember the traces of the loss of a model, on the rank of ``state``."""

    def __init__(self, model: CausalLM, state: ParallelState) -> None:
        self.model, self.state = model, state
        self._known: dict[object, Trace] = {}
        # The ranks that share the tokens of a row between the blocks.
        self._cut_over = state.tensor.size if state.sequence else 1

    def take(self, batch: MicroBatch, chunk: int, sums: int) -> Trace:
        """Return the trace of the loss of a micro-batch of one row, in chunks or of all logits at once."""
        key = batch, chunk, sums
        if key not in self._known:
            extended = self._of_fewer_chunks(batch, chunk, sums) or self._of_fewer_rows(batch, chunk, sums)
            self._known[key] = extended or self._trace(batch, chunk, sums)
        return self._known[key]

    def _of_fewer_chunks(self, batch: MicroBatch, chunk: int, sums: int) -> Trace | None:
        """Return the trace of a loss, which takes one chunk after the other, from fewer chunks."""
        uneven = chunk % self._cut_over
        if not chunk or uneven or (rounds := batch.length // chunk - _FEW_ROUNDS) < 2:
            return None
        few, longer = (
            self.take(replace(batch, length=batch.length - left * chunk), chunk, sums)
            for left in (rounds, rounds - 1)
        )
        return of_more_rounds(few, longer, rounds)

    def _of_fewer_rows(self, batch: MicroBatch, chunk: int, sums: int) -> Trace | None:
        """Return the trace of a loss, which reads a few rows of logits at a time, from fewer rows."""
        count, head = 1 + len(self.model.mtp), self.model.head_weight
        whole, of_token = (min(chunk, batch.length), 1) if chunk else (batch.length, count)
        columns = LossTerms(self.model.config.vocab_size).true_columns(len(head), self.state)
        block = rows_at_once(columns, gpu=batch.gpu)
        step = lcm(block, self._cut_over * count)
        if (rounds := (whole * of_token - _FEW_ROUNDS * block) // step) < 2 or batch.length % whole:
            return None

        def fewer(left: int) -> Trace:
            tokens = whole - left * step // of_token
            length = batch.length // whole * tokens
            return self.take(replace(batch, length=length), chunk and tokens, sums)

        return of_more_rounds(fewer(rounds), fewer(rounds - 1), rounds)

    def _trace(self, batch: MicroBatch, chunk: int, sums: int) -> Trace:
        model, size, count = self.model, self.model.config.vocab_size, 1 + len(self.model.mtp)
        head = output_of(model)

        def run(x: Tensor) -> Tensor:
            labels = ids_of(batch)
            if not chunk:
                labels = labels.repeat(count, 1)
                return vocab_parallel_cross_entropy(x, labels, size, overwrite=True, state=self.state).sum()
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
                    state=self.state,
                )
                for part in x.chunk(count)
            ]
            return sum(losses[1:], losses[0])

        with shapes_only([head], batch):
            if chunk:
                width = model.config.embedding_width
                shape = (batch.rows * count, batch.length // self._cut_over, width)
            else:
                shape = (batch.rows * count, batch.length, len(model.head_weight))
            make = partial(empty, shape, batch)
            return trace(run, make, [], others=[*head.parameters()], scalar=True)
