"""Compute the loss on held-out tokens: the same samples each time, the same number in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..data.batch import BatchParts
from ..data.batches import GlobalBatches
from ..data.shuffle import piece_of
from ..layers import IGNORE
from ..runs.metrics import StepMetrics
from .callbacks import Callback
from .run_data import HeldOut

if TYPE_CHECKING:
    from .step import Step
    from .trainer import Trainer


class Evaluator:
    """Compute the mean loss in nats over the tokens of the held-out samples: ``evaluate()``. Collective.

    The result is equal on every rank. There is no gradient, no dropout and no label smoothing, and torch's
    random state does not change. If the number of samples is not a multiple of the data ranks, the last ranks
    get additional rows that do not count; ``open_held_out`` has none for a user's loss. ``named``: the loss
    takes tensors by name, as of ``MicroBatches``.
    """

    def __init__(self, step: Step, held_out: HeldOut, *, named: bool = False) -> None:
        self.step, self.held_out, self.state, self.named = step, held_out, step.state, named

    def __call__(self) -> float:
        held_out, size, batches = self.held_out, self.step.micro_batch, self.held_out.batches
        share = piece_of(batches.global_batch, self.state.data_index, self.state.layout.data)
        if self.named:
            rows = self._rows(share)
            batch = rows if isinstance(rows, dict) else rows.samples()
        else:
            assert isinstance(batches, GlobalBatches)
            counted = range(share.start, max(share.start, min(share.stop, held_out.samples)))
            starts = range(share.start, share.stop, size)
            parts = (self._rows(range(start, min(start + size, share.stop))) for start in starts)
            labels = batches.count_labels(0, counted)
            batch = BatchParts(len(share), batches.sequence_length, labels, parts)
        return float(self.step.evaluate(batch).loss)

    def _rows(self, rows: range) -> Any:
        """Return held-out rows; those behind the samples do not count."""
        batch = self.held_out.batches.rows(0, rows)
        if isinstance(batch, dict):
            return batch
        beyond = (torch.tensor(rows) >= self.held_out.samples).unsqueeze(1)
        return batch._replace(labels=batch.labels.masked_fill(beyond, IGNORE))


class Evaluation(Callback):
    """Evaluate after every ``interval``-th step, and after the last one."""

    def __init__(self, evaluate: Evaluator, *, interval: int) -> None:
        self.evaluate, self.interval = evaluate, interval

    def begin(self, trainer: Trainer, start: int) -> None:
        self.terminal, self.at, self._steps = trainer.terminal, trainer.at, trainer.recipe.steps

    def after(self, metrics: StepMetrics) -> Mapping[str, Any] | None:
        done = metrics.step + 1
        if done % self.interval and done != self._steps:
            return None
        self.at("evaluation", done)
        loss = self.evaluate()
        figures = {"evaluation_loss": loss, "evaluation_perplexity": perplexity(loss)}
        self.terminal.evaluation(metrics.joined(figures, "evaluation"))
        return figures


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
