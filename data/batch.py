"""Hold what a step is given: token ids, the labels that they are to predict, and where documents start."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..layers import IGNORE, cut_sequence
from ..parallel_state import BadInput, ParallelState


class Batch(NamedTuple):
    """Hold ``input_ids``, ``labels`` and ``positions``: int64 of shape (B, S) each, what a step takes.

    A label is the token that follows, so a loss shifts nothing; the label ``IGNORE`` does not count.
    ``positions`` are the only statement of where documents start: within a row they start again at 0 there,
    and a document sees only itself. ``None``: each row is one document, 0 to S-1.
    """

    input_ids: Tensor
    labels: Tensor
    positions: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``; from pinned memory the copy continues after the return."""
        return self._each(lambda one: one.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """Return the batch in pinned memory, from which a GPU copies by itself."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        positions = None if self.positions is None else change(self.positions)
        return Batch(change(self.input_ids), change(self.labels), positions)

    def check_ids(self, vocab_size: int) -> Batch:
        """Return the batch; raise ``BadInput`` for an id, or a label that counts, outside the vocabulary.
        Runs on the host.
        """
        for name, ids in (("token id", self.input_ids), ("label", self.labels)):
            wrong = ((ids < 0) | (ids >= vocab_size)) & ((ids != IGNORE) | (ids is self.input_ids))
            if bool(wrong.any()):
                raise BadInput(
                    "batch", name, expected=f"0 to {vocab_size - 1}, the model's vocabulary",
                    found=int(ids[wrong][0]), todo="Were the tokens made with another tokenizer?",
                )  # fmt: skip
        return self

    def of_context(self, state: ParallelState) -> Batch:
        """Return this context rank's chunks of each row."""
        return self if state.context_size == 1 else self._each(lambda one: cut_sequence(one, state))

    def split(self, size: int) -> list[Batch]:
        """Return micro-batches of ``size`` rows, in order."""
        pairs = list(zip(self.input_ids.split(size), self.labels.split(size), strict=True))
        if self.positions is None:
            return [Batch(ids, labels) for ids, labels in pairs]
        places = self.positions.split(size)
        return [Batch(ids, labels, at) for (ids, labels), at in zip(pairs, places, strict=True)]
