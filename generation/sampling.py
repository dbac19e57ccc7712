"""Choose the next token: the likeliest, or one drawn from those that temperature, top_k and top_p leave."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parallel_state import BadInput


@dataclass(frozen=True)
class Sampling:
    """State how the next token is chosen.

    ``temperature`` 0 takes the likeliest token. Above 0 the token is drawn from the ``top_k`` likeliest
    tokens (0: all) and from the smallest set of tokens that holds ``top_p`` of the probability (Holtzman et
    al. 2020).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise BadInput("generate", "temperature", expected="a number from 0 up", found=self.temperature)
        if self.top_k < 0:
            raise BadInput("generate", "top_k", expected="0 or more", found=self.top_k)
        if not 0 < self.top_p <= 1:
            raise BadInput("generate", "top_p", expected="above 0 and at most 1", found=self.top_p)


def choose(
    logits: Tensor,
    sampling: Sampling,
    *,
    uniform: Tensor | None = None,
    banned: Collection[int] = (),
) -> Tensor:
    """Choose one token id for each row, from logits (B, V); never one that is ``banned``.

    ``uniform`` (B), numbers from [0, 1), gives each row's draw in the cumulated probabilities: the same
    number gives the same token, on any device and whatever the other rows are.
    """
    if banned:
        logits = logits.clone()
        logits[:, sorted(banned)] = float("-inf")
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    assert uniform is not None, "sampling needs its random numbers"
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / sampling.temperature
    if sampling.top_k:
        least = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        chances = ordered.softmax(-1)
        before = chances.cumsum(-1) - chances
        drop = (before >= sampling.top_p).scatter(-1, order, before >= sampling.top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    cumulated = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    total = cumulated[:, -1:]
    drawn = (cumulated <= uniform.unsqueeze(1) * total).sum(-1)
    # The last one that has a probability: the product above may have been rounded up to the total.
    return torch.minimum(drawn, (cumulated < total).sum(-1))
