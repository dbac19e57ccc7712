"""Compute multi-head latent attention: keys and values are made from one narrow vector a token, the latent.

B batch  S sequence  T tokens so far  D hidden  R latent  E head dim  H heads here
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...parallel_state import BadInput, Initial, ParallelState, alone_or
from ..collectives import enter_sends, enter_tensor
from ..column_parallel_linear import ColumnParallelLinear
from ..cost import Cost, Tokens, cost_of, sum_costs
from ..dropout import own_random
from ..norm import RMSNorm
from ..replicated_linear import ReplicatedLinear
from ..row_parallel_linear import RowParallelLinear
from .backends import AttentionCall, PinnedBackend
from .causal import call_of, causal_attention, merge_heads, split_heads
from .inputs import AttentionInputs
from .kernel_checks import checked_backend
from .mask import AttentionScope
from .ring_and_gathered_attention import context_sends, context_working


class MultiHeadLatentAttention(nn.Module):
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
    latents and of the output. ``norm_eps``: that of the norms of the latents. ``scale``: factor of the
    scores; the default is that of the width of a query head to the power of -0.5. ``dropout``: dropout of the
    attention weights. Source: DeepSeek-V2 (2024), section 2.1.
    """

    #: It sees all earlier tokens.
    window: int | None = None
    #: What computes it, see ``backends.py``; ``set_attention_backend`` pins it.
    backend: PinnedBackend = "auto"

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
        norm_eps: float = 1e-6,
        rotary: str = "all",
        scale: float | None = None,
        dropout: float = 0.0,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        if v_head_dim > qk_nope_head_dim + qk_rope_head_dim:
            most = qk_nope_head_dim + qk_rope_head_dim
            expected = f"at most {most}, the width of a query head"
            raise BadInput("attention", "v_head_dim", expected=expected, found=v_head_dim)
        self.state, self.rotary, self.scale, self.dropout = alone_or(state), rotary, scale, dropout
        self.key_parts, self.value_parts = (
            (qk_nope_head_dim, qk_rope_head_dim),
            (qk_nope_head_dim, v_head_dim),
        )
        self.key_dim, self.heads = sum(self.key_parts), heads
        self.latent_parts, self.direct = (kv_lora_rank, qk_rope_head_dim), q_lora_rank is None
        width = heads * self.key_dim
        if q_lora_rank is None:
            self.q = ColumnParallelLinear(
                hidden_size, width, False, unit=self.key_dim, initial=initial, state=state
            )
        else:
            self.q_down = ReplicatedLinear(hidden_size, q_lora_rank, bias, initial=initial, state=state)
            self.q_norm = RMSNorm(q_lora_rank, norm_eps, state=state)
            self.q_up = ColumnParallelLinear(
                q_lora_rank, width, False, unit=self.key_dim, initial=initial, state=state
            )
        self.kv_down = ReplicatedLinear(
            hidden_size, sum(self.latent_parts), bias, initial=initial, state=state
        )
        self.kv_norm = RMSNorm(kv_lora_rank, norm_eps, state=state)
        each = sum(self.value_parts)
        self.kv_up = ColumnParallelLinear(
            kv_lora_rank, heads * each, False, unit=each, initial=initial, state=state
        )
        self.out = RowParallelLinear(
            heads * v_head_dim, hidden_size, bias, unit=v_head_dim, initial=initial, state=state
        )

    @property
    def one_graph(self) -> bool:
        """Return whether ``torch.compile`` can make one graph of it.

        It cannot over context ranks, and where tensor ranks draw dropout's masks of their own.
        """
        return self.state.context_size == 1 and not (self.dropout and self.state.tensor_size > 1)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the attention of ``x``, of the same shape."""
        rope, scope = inputs.rope(self.rotary), inputs.scope(None)
        still_BHSE, turned_BHSE = split_heads(self._queries(x_BSD), self.key_dim).split(
            self.key_parts, dim=-1
        )
        q_BHSE = _joined(still_BHSE, rope(turned_BHSE))
        latent_BSR, key_BSE = self.kv_down(x_BSD).split(self.latent_parts, dim=-1)
        # One rotated key serves all heads, and so all ranks.
        key_B1SE = rope(enter_tensor(key_BSE, self.state).unsqueeze(1))
        latent_B1TR, key_B1TE = scope.extend(self, self.kv_norm(latent_BSR).unsqueeze(1), key_B1SE)
        made_BHTE = split_heads(self.kv_up(latent_B1TR.squeeze(1)), sum(self.value_parts))
        k_BHTE, v_BHTE = made_BHTE.split(self.value_parts, dim=-1)
        k_BHTE = _joined(k_BHTE, key_B1TE.expand(-1, k_BHTE.shape[1], -1, -1))
        dropout = self.dropout if self.training else 0.0
        with own_random(self.state, split=dropout > 0):
            heads_BHSE = causal_attention(
                q_BHSE, k_BHTE, v_BHTE, scope, dropout=dropout, scale=self.scale, backend=self.backend
            )
        out: Tensor = self.out(merge_heads(heads_BHSE))
        return out

    def prepare(self, q_BHSE: Tensor, scope: AttentionScope) -> None:
        """Make what this layer needs of the scope, for queries of this shape, dtype and device."""
        backend = checked_backend(self.call(q_BHSE, scope), self.backend, q_BHSE.device, self.state)
        scope.prepare(backend, q_BHSE, self.key_dim)

    def call(self, q_BHSE: Tensor, scope: AttentionScope) -> AttentionCall:
        """Describe this layer's call of attention, for the choice of its backend."""
        dropout = self.dropout if self.training else 0.0
        return call_of(q_BHSE, self.value_parts[1], scope, dropout=dropout, score="", width=self.key_dim)

    def _queries(self, x_BSD: Tensor) -> Tensor:
        """Return the queries of this rank's heads, (B, S, H E)."""
        q_BSH: Tensor = self.q(x_BSD) if self.direct else self.q_up(self.q_norm(self.q_down(x_BSD)))
        return q_BSH

    def cost(self, tokens: Tokens) -> Cost:
        """Add up products, norms, and attention's own: what it keeps and sends over context ranks."""
        state, between = self.state, tokens.between_blocks(self.state)
        first = self.q if self.direct else self.q_down
        key_values: list[nn.Module] = [self.kv_down, self.kv_norm, self.kv_up]
        queries = [self.q] if self.direct else [self.q_down, self.q_norm, self.q_up]
        found = sum_costs(queries, tokens).beside(between.bytes(tokens.hidden))
        if first.keeps_input and self.kv_down.keeps_input and not (state.sequence and self.direct):
            found += Cost(kept=-between.bytes(tokens.hidden))  # they keep the same one
        query = self.heads // state.tensor_size * self.key_dim
        found += sum_costs(key_values, tokens).beside(tokens.bytes(query))
        # The norms keep what these products make, the whole of it, unless they bring it to fp32 first.
        latents = sum(one.out_features for one in (first, self.kv_down) if isinstance(one, ReplicatedLinear))
        as_made = tokens.fused or tokens.compute == tokens.inner
        made, turned = tokens.after(*queries, *key_values), tokens.after(self.kv_down)
        scores = Cost(
            kept=between.bytes(self.latent_parts[1] * as_made),
            selective=between.bytes(latents),
            sends=enter_sends(turned, self.latent_parts[1], state),
        ) + self._cost_of_scores(made)
        return found + scores.under(made) + cost_of(self.out, made)

    def cache_bytes(self, tokens: Tokens) -> float:
        """Return the bytes that a ``KeyValueCache`` of these tokens keeps: latents and rotated keys."""
        return tokens.bytes(sum(self.latent_parts))

    def _cost_of_scores(self, tokens: Tokens) -> Cost:
        ranks, whole = self.state.context_size, tokens.length * self.state.context_size
        heads, count = self.heads // self.state.tensor_size, tokens.count
        query, value, made = (
            heads * width for width in (self.key_dim, self.value_parts[1], sum(self.value_parts))
        )
        narrow = self.value_parts[1] < self.key_dim
        one_operator = ranks == 1 and (tokens.fused or not self.dropout)
        sums = heads * count * tokens.inner  # a logsumexp a head
        if ranks > 1:  # values are a part of what was made with them; the output projection takes a copy
            kept = 2 * query + made + value
        else:  # narrow values and the output that belongs to them are brought to the width of queries
            kept = 2 * query + (query if narrow else made) + (query * one_operator if narrow else 0)
            kept += 0 if narrow or self.out.keeps_input else query
        written = 0.0 if one_operator or ranks > 1 else 3 * heads * whole * count * tokens.compute
        products = sum(
            one.parts[0].here
            for one in self.children()
            if isinstance(one, ColumnParallelLinear) and one.in_features == tokens.hidden
        )
        return Cost(
            kept=tokens.bytes(kept) + sums + written,
            selective=tokens.bytes(products + query * one_operator) + sums * one_operator,
            working=self._working(tokens, query, value) + written / 3,
            sends=context_sends(tokens, query + value, self.state),
            attention=2.0 * self.heads * (self.key_dim + self.value_parts[1]) * whole * count,
        )

    def _working(self, tokens: Tokens, query: int, value: int) -> float:
        """Return the bytes of the gradients of attention's output, queries, keys and values, as wide as
        queries; and of the output, unless a wider one is kept.
        """
        if self.state.context_size > 1:
            return context_working(tokens, query, query + value, value, self.state)
        return tokens.bytes(4 * query + value * (value == query))


def _joined(still_BHSE: Tensor, turned_BHSE: Tensor) -> Tensor:
    """Put both parts of each head together, with tokens before heads in memory, as products leave them."""
    both = (still_BHSE.transpose(1, 2), turned_BHSE.transpose(1, 2))
    return torch.cat(both, dim=-1).transpose(1, 2)
