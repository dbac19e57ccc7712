"""Change attention's scores: a scale, a soft cap (``attn_logit_softcapping``), linear biases (ALiBi), sinks.

With ALiBi a score falls with the distance of its key, by a slope of the head. A sink is one more score of
each head, learnt, that takes a share of the softmax and has no value.

B batch  H query heads here  S or Q queries  T keys  E head dim

Sources: Press et al. 2022 (ALiBi); Xiao et al. 2023 and GPT-OSS's model card (2025), section 2.2 (sinks).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import floor, log2
from typing import NamedTuple

import torch
from torch import Tensor

from ..host_numbers import constants
from .backends import Score

#: Makes, for some rows of queries, what is added to their scores, in the scores' dtype.
ScoreBias = Callable[[slice, torch.dtype], Tensor]


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head, in fp32: a geometric sequence that ends at 2 ** -8.

    If the number of heads n is not a power of two, let p be the next lower one. The first p heads then have
    the slopes of p heads, and the others have every second slope of 2 p heads.

    >>> alibi_slopes(3)
    (0.0625, 0.00390625, 0.25)
    """
    lower = 2 ** floor(log2(heads))
    powers = torch.arange(1, lower + 1, dtype=torch.int32, device="cpu")
    slopes = torch.tensor(2.0 ** -(8 / lower), device="cpu") ** powers
    between = torch.tensor(2.0 ** -(4 / lower), device="cpu") ** (2 * powers[: heads - lower] - 1)
    return tuple(torch.cat((slopes, between)).tolist())


@dataclass(frozen=True, slots=True)
class Alibi:
    """Describe the biases of all heads: ``factor`` times slope times the key's position less the query's.

    ``rounded``: slopes, positions and products are rounded to bf16 in any dtype (Falcon was trained so).
    """

    slopes: tuple[float, ...]
    factor: float = 1.0
    rounded: bool = False

    def of_heads(self, start: int, stop: int) -> "Alibi":
        """Return the biases of the heads from ``start`` up to ``stop``."""
        return replace(self, slopes=self.slopes[start:stop])

    def steepness(self, device: torch.device) -> Tensor:
        """Return (H,) in fp32: what a key's score changes by for each position that it lies ahead."""
        return constants(self.slopes, device, torch.float32) * self.factor

    def bias(self, queries_Q: Tensor, keys_T: Tensor, starts_BQ: Tensor | None) -> ScoreBias:
        """Return the bias of scores, from the places of queries and keys in their row, and from the places
        where the queries' documents start, B of them or 1; ``None``: with the row.
        """

        def bias(rows: slice, dtype: torch.dtype) -> Tensor:
            queries, keys = queries_Q[None, rows, None], keys_T.view(1, 1, -1)
            if starts_BQ is not None:
                starts = starts_BQ[:, rows, None]
                queries, keys = queries - starts, keys - starts
            # Less that of the query, which shifts all its scores alike: small numbers have more digits.
            return self._products(keys, dtype) - self._products(queries, dtype)

        return bias

    def _products(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, Q, T) -> (B, H, Q, T)"""
        slopes = constants(self.slopes, positions.device, dtype).view(-1, 1, 1)
        if self.rounded:
            return (slopes.bfloat16() * positions.unsqueeze(1)).to(dtype) * self.factor
        return slopes * positions.unsqueeze(1) * self.factor


class Scores(NamedTuple):
    """State what becomes of an attention's scores; ``causal_attention`` explains each. ``sinks``: (H,)."""

    scale: float | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    alibi: Alibi | None = None
    dropout: float = 0.0

    @property
    def kind(self) -> Score:
        """Return the name of a further change of the scores (``AttentionCall.score``)."""
        if self.alibi is not None:
            return "rounded ALiBi" if self.alibi.rounded else "ALiBi"
        return "soft cap" if self.soft_cap is not None else "sinks" if self.sinks is not None else ""


def add_sinks(out_BHSE: Tensor, log_sums_BHS: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sums with the sinks, from those over all keys; call it once for each query."""
    both_BHS = torch.logaddexp(log_sums_BHS, sinks_H.to(log_sums_BHS.dtype).view(-1, 1))
    return out_BHSE * (log_sums_BHS - both_BHS).exp().unsqueeze(-1), both_BHS


def sinks_gradient(grad_BHSE: Tensor, out_BHSE: Tensor, log_sums_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of the sinks, (H,); output and log-sums are those of ``add_sinks``.

    Those of queries, keys and values need no rule: ``attend_backward`` takes the same output and log-sums.
    """
    inner = log_sums_BHS.dtype
    shares_BHS = (sinks_H.to(inner).view(-1, 1) - log_sums_BHS).exp()
    rest_BHS = (grad_BHSE.to(inner) * out_BHSE.to(inner)).sum(-1)
    return -(shares_BHS * rest_BHS).sum((0, 2)).to(sinks_H.dtype)
