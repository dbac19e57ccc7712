"""Compute the loss on held-out tokens: the same samples each time, the same number in every layout. In a run
after some of its steps, or of stored weights alone (``trilith evaluate``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..data.batch import Batch, BatchParts
from ..data.batches import GlobalBatches
from ..data.sample_order import piece_of
from ..data.token_file import TokenFile
from ..data.token_index import check_vocabulary
from ..generation.command import Ranks, Weights
from ..layers import IGNORE
from ..parallel_state import Layout, ParallelState, require
from ..runs.metrics import StepMetrics
from .callbacks import Callback
from .run_data import HeldOut, check_documents, check_labels, check_tokenizer, separate_padding
from .step import Step
from .token_loss import TokenLoss

if TYPE_CHECKING:
    from .trainer import Trainer

#: The length of a row unless another one is asked for, a run trained with another, or the model takes less.
_LENGTH = 2048


def held_out_loss(step: Step, held_out: HeldOut) -> float:
    """Return the mean loss in nats over the tokens of the held-out samples, equal on every rank. Collective.

    There is no gradient, no dropout and no label smoothing, and torch's random state does not change. If the
    number of samples is not a multiple of the data ranks, the last ranks get additional rows that do not
    count; ``open_held_out`` has none for a user's loss.
    """
    batches, state, size = held_out.batches, step.state, step.micro_batch
    share = piece_of(batches.global_batch, state.data_index, state.layout.data)

    if not isinstance(step.loss, TokenLoss):
        rows = batches.rows(0, share)
        return float(step.evaluate(rows if isinstance(rows, dict) else rows.samples()).loss)
    assert isinstance(batches, GlobalBatches)

    def part(start: int) -> Batch:
        rows = range(start, min(start + size, share.stop))
        batch = batches.rows(0, rows)
        beyond = (torch.tensor(rows) >= held_out.samples).unsqueeze(1)
        return batch._replace(labels=batch.labels.masked_fill(beyond, IGNORE))

    counted = range(share.start, max(share.start, min(share.stop, held_out.samples)))
    labels, parts = batches.count_labels(0, counted), map(part, range(share.start, share.stop, size))
    return float(step.evaluate(BatchParts(len(share), labels, parts)).loss)


class Evaluation(Callback):
    """Evaluate every ``evaluation.every`` steps of a recipe, and after the last one."""

    def begin(self, trainer: Trainer, start: int) -> None:
        recipe, held_out = trainer.recipe, trainer.plan.held_out
        assert recipe.evaluation is not None and held_out is not None
        self.step, self.held_out, self.interval = trainer.step, held_out, recipe.evaluation.every
        self.terminal, self.at, self._steps = trainer.terminal, trainer.at, recipe.steps

    def after(self, metrics: StepMetrics) -> Mapping[str, Any] | None:
        steps = metrics.step + 1
        if steps % self.interval and steps != self._steps:
            return None
        self.at("evaluation", steps)
        loss = held_out_loss(self.step, self.held_out)
        figures = {"evaluation_loss": loss, "evaluation_perplexity": perplexity(loss)}
        self.terminal.evaluation(metrics.joined(figures, "evaluation"))
        return figures


def perplexity(loss: float) -> float | None:
    """Return ``e`` to the mean loss in nats; ``None`` if a float cannot hold it."""
    return math.exp(loss) if loss < 700 else None


@dataclass(frozen=True)
class Question:
    """State what to evaluate, on which rows. ``batch``: number of rows computed at once."""

    source: str | Path
    tokens: Path
    sequence_length: int | None = None
    rows: int | None = None
    batch: int = 4
    dtype: str = "float32"
    adapter: Path | None = None


@dataclass(frozen=True)
class Figures:
    """Report the mean loss in nats over the tokens that count, and its perplexity, ``None`` if too large."""

    loss: float
    perplexity: float | None
    tokens: int
    rows: int
    sequence_length: int


@dataclass(frozen=True)
class _Opened(Weights):
    batches: GlobalBatches


def run_evaluation(question: Question, ranks: Ranks, show: Callable[[Figures], str]) -> int:
    """Note the figures as ``show`` writes them; the exit code."""

    def evaluate(opened: _Opened, state: ParallelState, device: str) -> str:
        model, batches = opened.load(state), opened.batches
        separate_padding(model, batches)
        rows = batches.global_batch
        step = Step(model, TokenLoss(model), micro_batch=question.batch)
        loss = held_out_loss(step, HeldOut(batches, rows))
        todo = f"Its numbers overflow {question.dtype}, or its weights are broken: try a wider --dtype"
        require(math.isfinite(loss), "evaluate", "loss", "a finite number", loss, todo)
        tokens = batches.count_labels(0, range(rows))
        return show(Figures(loss, perplexity(loss), tokens, rows, batches.sequence_length))

    return ranks.run(partial(_open, question, ranks.layout), evaluate, asked=repr(question))


def _open(question: Question, layout: Layout) -> _Opened:
    """Read everything but the weights. Raises ``BadInput`` for what cannot be evaluated."""
    weights = Weights.of(question.source, question.adapter, layout, question.dtype, "evaluate")
    source = weights.source
    config, most = source.model_config, source.model_config.max_position_embeddings
    file = TokenFile.open(question.tokens)
    check_vocabulary(file.vocab_size, config.vocab_size, question.tokens)
    manifest = (weights.adapter or source).manifest
    position = None if manifest is None else manifest.data_position
    trained = position.get("sequence_length") if isinstance(position, dict) else None
    trained = trained if isinstance(trained, int) and trained > 0 else None
    length = question.sequence_length or trained or min(_LENGTH, most)
    require(length <= most, "evaluate", "--sequence-length", f"at most {most:,}", f"{length:,}")
    batches = GlobalBatches(file, length, 1, 0)
    check_tokenizer(batches, source.path, "evaluate")
    batches = batches.resized(min(question.rows or batches.samples, batches.samples))
    rows, model = batches.global_batch, source.family.on_meta(config)
    todo = "Evaluate a chat set with rows that hold one sample, or text tokenized as one document"
    check_documents(batches, model, "evaluate", str(question.tokens), todo, first=range(rows))
    check_labels(batches, rows, "evaluate", "--rows")
    return _Opened(**vars(weights), batches=batches)
