"""Shift a batch for multi-token prediction: the tokens ahead of each token, and their labels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layers import IGNORE
from .batch import Batch


def tokens_ahead(batch: Batch, blocks: int) -> Tensor:
    """Return what ``blocks`` blocks of multi-token prediction are given, (B, 2, ``blocks``, S).

    For the m-th block it has the id that lies m places ahead of each token, and the label of that place,
    which is ``IGNORE`` where the place is not in the token's document. The batch must hold whole rows.
    """
    found = []
    for places in range(1, blocks + 1):
        coming, wanted = _earlier(batch.input_ids, places, 0), _earlier(batch.labels, places, IGNORE)
        if batch.positions is not None:
            same = _earlier(batch.positions, places, -1) == batch.positions + places
            wanted = torch.where(same, wanted, IGNORE)
        found.append(torch.stack([coming, wanted], dim=1))
    return torch.stack(found, dim=2)


def all_labels(labels: Tensor, ahead: Tensor | None) -> Tensor:
    """Return the labels (B, S); with tokens ahead theirs after them, (B, 1 + blocks, S)."""
    return labels if ahead is None else torch.cat([labels.unsqueeze(1), ahead[:, 1]], dim=1)


def _earlier(x_BS: Tensor, places: int, last: int) -> Tensor:
    """Return rows whose numbers lie so many places earlier, with ``last`` at their ends."""
    return F.pad(x_BS[:, places:], (0, min(places, x_BS.shape[1])), value=last)
