"""Text from a model: the next token chosen again and again, greedily or by chance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..layers import gather_logits
from ..parallel_state import BadInput
from .family import CausalLM


@torch.no_grad()
def generate(
    model: CausalLM,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """``tokens`` (B, S) and up to ``max_new_tokens`` more: (B, S + new).

    ``temperature`` 0 takes the likeliest token; above 0 samples, from the ``top_k`` likeliest (0: all) and
    the smallest set that holds ``top_p`` of the probability. Rows that have ended with ``eos_id`` are padded
    with it. The whole sequence is computed again for each token.
    """
    config = model.config
    if not tokens.shape[1]:
        raise BadInput("generate", "prompt", expected="at least one token", found="none")
    if not 0 < top_p <= 1:
        raise BadInput("generate", "top_p", expected="above 0 and at most 1", found=top_p)
    if tokens.shape[1] + max_new_tokens > config.max_position_embeddings:
        raise BadInput(
            "generate",
            "prompt and new tokens",
            expected=f"at most the model's {config.max_position_embeddings} positions",
            found=tokens.shape[1] + max_new_tokens,
        )
    was_training = model.training
    model.eval()
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for _ in range(max_new_tokens):
        logits = gather_logits(model(tokens)[:, -1:], config.vocab_size, state=model.state)[:, -1]
        new = choose(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if eos_id is not None:
            new = torch.where(ended, eos_id, new)
            ended |= new == eos_id
        tokens = torch.cat((tokens, new.unsqueeze(1)), dim=1)
        if on_token is not None:
            on_token(new)
        if bool(ended.all()):
            break
    model.train(was_training)
    return tokens


def choose(
    logits: Tensor,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token id a row, from logits (B, V)."""
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        drop = (before >= top_p).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
