"""Hold what a step is given: token ids, the labels that they are to predict, and where documents start."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layers import IGNORE
from ..layers.host_numbers import send
from ..parallel_state import BadInput


class Batch(NamedTuple):
    """Hold ``input_ids``, ``labels`` and ``positions``: int64 of shape (B, S) each, what a step takes.

    A label is the token that follows, so a loss shifts nothing; the label ``IGNORE`` does not count.
    ``positions`` are the only statement of where documents start: within a row they start again at 0 there,
    and a document sees only itself. ``None``: each row is one document, 0 to S-1.
    """

    input_ids: Tensor
    labels: Tensor
    positions: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on ``device``; from pinned memory the copy continues after the return. The host
        still knows the numbers, see ``host_numbers``.
        """
        return Batch(*(send(tensor, device) for tensor in self if tensor is not None))

    def samples(self) -> dict[str, Tensor]:
        """Return the tensors by name, as a step takes them; ``positions`` if there are some."""
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None}

    def check_form(self) -> "Batch":
        """Return the batch; raise ``BadInput`` unless it holds whole rows of integers, all of one shape."""
        shape = self.input_ids.shape if isinstance(self.input_ids, Tensor) else ()
        for name, tensor in self._asdict().items():
            if tensor is None and name == "positions":
                continue
            actual = type(tensor).__name__
            if isinstance(tensor, Tensor):
                actual = f"{str(tensor.dtype).removeprefix('torch.')} of shape {[*tensor.shape]}"
                integers = tensor.dtype in (torch.int32, torch.int64)
                if integers and tensor.ndim == 2 and tensor.numel() and tensor.shape == shape:
                    continue
            expected = "int64 of shape (rows, length), at least 1 each, as input_ids"
            raise BadInput("batch", name, expected=expected, found=actual)
        return self

    def check_ids(self, vocab_size: int) -> "Batch":
        """Return the batch; raise ``BadInput`` for an id, or a label that counts, outside the vocabulary.
        Runs on the host.
        """
        beyond = (self.labels < 0) | (self.labels >= vocab_size)
        for name, ids, wrong in (
            ("token id", self.input_ids, (self.input_ids < 0) | (self.input_ids >= vocab_size)),
            ("label", self.labels, beyond & (self.labels != IGNORE)),
        ):
            if bool(wrong.any()):
                raise BadInput(
                    "batch", name, expected=f"0 to {vocab_size - 1}, the model's vocabulary",
                    found=int(ids[wrong][0]), todo="Were the tokens made with another tokenizer?",
                )  # fmt: skip
        return self

    def split(self, size: int) -> "list[Batch]":
        """Return micro-batches of ``size`` rows, in order."""
        parts = (tensor.split(size) for tensor in self if tensor is not None)
        return [Batch(*part) for part in zip(*parts, strict=True)]


class BatchParts(NamedTuple):
    """Hold a batch of ``rows`` rows whose parts, whole rows in order, are made as they are asked for, once.

    ``labels``: how many labels of the whole batch count. The ids are known to be within the vocabulary.
    """

    rows: int
    labels: int
    parts: Iterator[Batch]


def tokens_ahead(batch: Batch, blocks: int) -> Tensor:
    """Return what ``blocks`` blocks of multi-token prediction are given, (B, 2, ``blocks``, S).

    For the m-th block it has the id that lies m places ahead of each token, and the label of that place,
    which is ``IGNORE`` where the place is not in the token's document. The batch must hold whole rows.
    """
    of_blocks = []
    for places in range(1, blocks + 1):
        coming, labels = _earlier(batch.input_ids, places, 0), _earlier(batch.labels, places, IGNORE)
        if batch.positions is not None:
            same = _earlier(batch.positions, places, -1) == batch.positions + places
            labels = torch.where(same, labels, IGNORE)
        of_blocks.append(torch.stack([coming, labels], dim=1))
    return torch.stack(of_blocks, dim=2)


def _earlier(x_BS: Tensor, places: int, last: int) -> Tensor:
    """Return rows shifted to the left by ``places``, with ``last`` at their ends."""
    return F.pad(x_BS[:, places:], (0, min(places, x_BS.shape[1])), value=last)
