"""Compute multi-head latent attention: keys and values are made from one narrow vector a token, the latent.

B batch  S sequence  T tokens so far  D hidden  R latent  E head dim  H heads here
"""

from typing import Any

import torch
from torch import Tensor

from ...parallel_state import Initial, ParallelState, require
from ..collectives import enter_tensor
from ..norm import RMSNorm
from ..parallel_linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from .attention import AttentionLayer
from .causal import split_heads
from .inputs import AttentionInputs
from .scores import Scores


class MultiHeadLatentAttention(AttentionLayer):
    """Compute causal self-attention whose keys and values are products of a normalised latent (DeepSeek-V2).

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism. A head of queries and keys
    is ``qk_nope_head_dim`` numbers without a position and ``qk_rope_head_dim`` numbers that are rotated; all
    heads share the rotated part of the key. A head of values has ``v_head_dim`` numbers, at most as many.

    Every tensor rank computes the latents, of its own tokens under sequence parallelism; the products of the
    latents are cut by heads. Between them a rank receives latents, not hidden states. With a cache the latent
    and the rotated key are kept, which are much smaller than keys and values; each forward makes the keys and
    values of all tokens so far again.

    ``q_lora_rank``: width of the queries' latent; ``None``: queries come from the hidden states.
    ``kv_lora_rank``: width of the latent of keys and values. ``bias``: biases of the products that make
    latents and of the output. ``scale``: factor of the scores; the default is the width of a query head to
    the power of -0.5. ``dropout``: dropout of the attention weights. Source: DeepSeek-V2 (2024), section 2.1.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        bias: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        key_dim = qk_nope_head_dim + qk_rope_head_dim
        expected = f"at most {key_dim}, the width of a query head"
        require(v_head_dim <= key_dim, "attention", "v_head_dim", expected, v_head_dim)
        super().__init__(heads, key_dim, v_head_dim, Scores(scale, dropout=dropout), state=state)
        self.sinks = None
        self.key_parts = qk_nope_head_dim, qk_rope_head_dim
        self.value_parts = qk_nope_head_dim, v_head_dim
        self.latent_parts, self.direct = (kv_lora_rank, qk_rope_head_dim), q_lora_rank is None
        common: dict[str, Any] = {"initial": initial, "state": state}
        if q_lora_rank is None:
            self.q = ColumnParallelLinear(hidden_size, heads * key_dim, False, unit=key_dim, **common)
        else:
            self.q_down = ReplicatedLinear(hidden_size, q_lora_rank, bias, **common)
            self.q_norm = RMSNorm(q_lora_rank, state=state)
            self.q_up = ColumnParallelLinear(q_lora_rank, heads * key_dim, False, unit=key_dim, **common)
        self.kv_down = ReplicatedLinear(hidden_size, sum(self.latent_parts), bias, **common)
        self.kv_norm = RMSNorm(kv_lora_rank, state=state)
        head_width = sum(self.value_parts)
        self.kv_up = ColumnParallelLinear(kv_lora_rank, heads * head_width, False, unit=head_width, **common)
        for up in (self.kv_up,) if self.direct else (self.q_up, self.kv_up):
            up.recomputed = True  # many times wider than the latents from which it follows
        self.out = RowParallelLinear(heads * v_head_dim, hidden_size, bias, unit=v_head_dim, **common)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the attention of ``x``, of the same shape."""
        rope, scope = inputs.rope("all"), inputs.scope(None)
        q_BSF: Tensor = self.q(x_BSD) if self.direct else self.q_up(self.q_norm(self.q_down(x_BSD)))
        still_BHSE, turned_BHSE = split_heads(q_BSF, self.key_dim).split(self.key_parts, dim=-1)
        q_BHSE = _joined(still_BHSE, rope(turned_BHSE))
        latent_BSR, key_BSE = self.kv_down(x_BSD).split(self.latent_parts, dim=-1)
        # One rotated key serves all heads, and so all ranks.
        key_B1SE = rope(enter_tensor(key_BSE, self.state).unsqueeze(1))
        latent_B1TR, key_B1TE = scope.extend(self, self.kv_norm(latent_BSR).unsqueeze(1), key_B1SE)
        made_BHTE = split_heads(self.kv_up(latent_B1TR.squeeze(1)), sum(self.value_parts))
        k_BHTE, v_BHTE = made_BHTE.split(self.value_parts, dim=-1)
        k_BHTE = _joined(k_BHTE, key_B1TE.expand(-1, k_BHTE.shape[1], -1, -1))
        return self.out(self.attend(q_BHSE, k_BHTE, v_BHTE, scope))


def _joined(still_BHSE: Tensor, turned_BHSE: Tensor) -> Tensor:
    """Put both parts of each head together, with tokens before heads in memory, as products leave them."""
    both = (still_BHSE.transpose(1, 2), turned_BHSE.transpose(1, 2))
    return torch.cat(both, dim=-1).transpose(1, 2)
