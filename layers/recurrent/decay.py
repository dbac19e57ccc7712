"""Compute decays within chunks of tokens: the share of what a token wrote that is left for a later token.

... heads, rows  N chunks  T tokens of a chunk (queries first, then keys)
"""

from math import ceil

import torch
from torch import Tensor
from torch.nn import functional as F

#: Tokens of a chunk: within it all pairs of tokens are computed, between chunks one state is handed on.
CHUNK = 64


class Decay:
    """Hold the decays of one recurrence in chunks. Across the start of a document nothing is left.

    ``logs``: (R, ..., N, T), the logarithm of each token's own decay. ``places_RL``: each token's place in
    its document; ``None``: no document starts.
    """

    def __init__(self, logs: Tensor, places_RL: Tensor | None) -> None:
        length = logs.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool, device=logs.device).tril()
        # Sums of the tokens between, and no differences of long sums, which would lose digits.
        steps = logs.unsqueeze(-1).expand(*logs.shape, length).masked_fill(~later.tril(-1), 0.0)
        between = steps.cumsum(-2)
        before, after = logs.cumsum(-1), between[..., -1, :]
        through = before[..., -1]
        if places_RL is not None:
            starts = in_chunks((places_RL == 0).long(), 1)
            starts = starts.view(len(starts), *(1,) * (logs.ndim - 3), *starts.shape[1:])
            number = starts.cumsum(-1)  # of the document within the chunk; 0: it started earlier
            later = later & (number.unsqueeze(-1) == number.unsqueeze(-2))
            before = before.masked_fill(number > 0, float("-inf"))
            after = after.masked_fill(number < number[..., -1:], float("-inf"))
            through = through.masked_fill(number[..., -1] > 0, float("-inf"))
        #: (..., N, T, T): from the token of the last dim to that of the one before, 0 for a later one.
        self.between = between.masked_fill(~later, float("-inf")).exp()
        #: (..., N, T): from the state before the chunk to each token, and from each token to the chunk's end.
        self.before, self.after = before.exp(), after.exp()
        #: (..., N): through the whole chunk.
        self.through = through.exp()


def in_chunks(x: Tensor, dim: int) -> Tensor:
    """Cut the tokens of ``dim`` into chunks, the last one filled up with zeros: (..., N, T, ...)."""
    length, dim = x.shape[dim], dim % x.ndim
    size = min(CHUNK, length)
    count = ceil(length / size)
    padding = [0, 0] * (x.ndim - 1 - dim) + [0, count * size - length]
    return torch.unflatten(F.pad(x, padding), dim, (count, size))
