"""Predict tokens after the next one: a block behind the last one, which is given the token between the two.

B batch  S sequence  D hidden
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...layers import AttentionInputs, ReplicatedLinear
from .hugging_face_names import Rule


class MultiTokenPrediction(nn.Module):
    """Compute the hidden states that predict one token further than those that are given.

    Input: hidden states (B, S, D) for the token after place t, and embeddings of that token, both (B, S /
    tensor, D) with sequence parallelism. Output: hidden states for the token after it, and the same
    normalised, for the output layer. Embedding and output layer are those of ``model``, a ``CausalLM``, and
    the block is made as its others are, with a ``number`` that counts on after the last one.
    Source: DeepSeek-V3 (2024), section 2.2; the embedding comes first in ``eh_proj``, as in its checkpoint.
    """

    def __init__(self, model: Any, number: int) -> None:
        super().__init__()
        cfg, block, norm = model.config, model.block(number), model.make_last_norm
        self.enorm, self.hnorm = norm(), norm()
        width, starts = cfg.hidden_size, cfg.initial
        self.eh_proj = ReplicatedLinear(2 * width, width, False, initial=starts, state=model.state)
        self.block, self.norm = block, norm()

    def forward(self, x_BSD: Tensor, next_BSD: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        joined = torch.cat([self.enorm(next_BSD), self.hnorm(x_BSD)], dim=-1)
        x_BSD = self.block(self.eh_proj(joined), inputs)
        return x_BSD, self.norm(x_BSD)


def multi_token_rules(rules: Iterable[Rule], *, tied: bool) -> list[Rule]:
    """Return the rules of such a block: those of the other blocks, its own tensors, and its copies of the
    embedding and the output layer.
    """
    at = "model.layers.{i}."
    own = [Rule(f"mtp.{{i}}.{module}", f"{at}{module}") for module in ("enorm", "hnorm", "eh_proj")]
    copies = [
        Rule("embed.weight", f"{at}embed_tokens.weight", copy=True),
        Rule("embed.weight" if tied else "head.weight", f"{at}shared_head.head.weight", copy=True),
    ]
    own += [Rule("mtp.{i}.norm", f"{at}shared_head.norm")]
    for rule in rules:
        if "i" in rule.numbers:
            ours = tuple(name.replace("layers.{i}.", "mtp.{i}.block.", 1) for name in rule.our_names)
            own.append(replace(rule, ours=ours))
    return [*copies, *own]
