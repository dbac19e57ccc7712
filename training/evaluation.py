"""Compute the loss on held-out tokens: the same samples each time, the same number in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..data.batch import Batch
from ..layers import IGNORE
from .run_data import HeldOut

if TYPE_CHECKING:
    from .step import Step


class Evaluator:
    """Compute the mean loss in nats over the tokens of the held-out samples: ``evaluate()``. Collective.

    The result is equal on every rank. There is no gradient, no dropout and no label smoothing, and torch's
    random state does not change. If the number of samples is not a multiple of the data ranks, the last ranks
    get additional rows that do not count.
    """

    def __init__(self, step: Step, held_out: HeldOut) -> None:
        self.step, self.held_out, self.state = step, held_out, step.state

    def __call__(self) -> float:
        return float(self.step.evaluate(self._share()).loss)

    def _share(self) -> Batch:
        """Return this data rank's rows: the first held-out rows in order, then rows that do not count."""
        state, ranks = self.state, self.state.layout.data
        batch = self.held_out.batches.batch(0, state.data_index, ranks)
        each = len(batch.input_ids)
        rows = torch.arange(each) + state.data_index * each
        beyond = (rows >= self.held_out.samples).unsqueeze(1)
        return batch._replace(labels=batch.labels.masked_fill(beyond, IGNORE))


def perplexity(loss: float) -> float | None:
    """Return ``e`` to the mean loss in nats; ``None`` if a float cannot hold it."""
    return math.exp(loss) if loss < 700 else None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn dropout off for the ``with`` block."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)
