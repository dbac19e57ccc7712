"""Attention as a layer: projections, rotation, causal attention and output, whole heads on each rank.

B batch  S sequence  D hidden  E head dim  H query heads here  K key/value heads here
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...parallel_state import Initial, ParallelState, alone_or, local, shared_units
from ..column_parallel_linear import ColumnParallelLinear
from ..cost import Cost, Tokens, cost_of
from ..device_constants import HostNumbers
from ..dropout import own_random
from ..norm import HeadsRMSNorm
from ..row_parallel_linear import RowParallelLinear
from .alibi import Alibi
from .backends import AttentionCall, Backend, PinnedBackend, choose_backend
from .blockwise import scores_bytes
from .causal import call_in_plan, call_of, causal_attention, merge_heads, score_name, split_heads
from .inputs import AttentionInputs
from .kernel_checks import checked_backend
from .mask import AttentionScope
from .ring_and_gathered_attention import context_sends, context_working
from .sinks import Sinks
from .visible import exceeds


class Attention(nn.Module):
    """Compute causal self-attention, in which several query heads may share a key/value head.

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism. Each tensor rank computes
    whole heads. Key/value heads that the ranks do not divide are shared (see ``ColumnParallelLinear``).

    ``kv_heads``: number of key/value heads; the default is ``heads``. ``qk_norm``: makes, from the number
    of heads, the norm of the queries and that of the keys, (B, heads here, S, E) in and out, which comes
    before the rotation (Qwen 3). ``rotary``: name of the rotation in ``AttentionInputs``; ``None``: no
    rotation (GPT-2). ``partial_rotary``: it leaves a part of each head as it is, and so lays heads in
    memory as products do, which ``cost`` asks for. ``window``: number of tokens that a token sees, itself
    included; ``None``: all earlier ones. ``scale``: factor of the scores; the default is ``head_dim **
    -0.5``. ``soft_cap``: bound of the scores (Gemma 2). ``sinks``: each head has one more score, which is
    learnt (GPT-OSS). ``alibi``: biases of all heads' scores by distance (Bloom, Falcon); a rank adds those
    of its own heads. ``gated``: the sigmoid of one more product of the input multiplies each number of the
    heads (Qwen3-Next; Qiu et al. 2025). ``dropout``: dropout of the attention weights. ``initial`` and
    ``out_initial``: initial weights of the input and of the output projection.
    Source: Ainslie et al. 2023 (grouped queries).
    """

    #: What computes it, see ``backends.py``; ``set_attention_backend`` pins it.
    backend: PinnedBackend = "auto"

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: Callable[[int], nn.Module] | None = None,
        rotary: str | None = "all",
        partial_rotary: bool = False,
        window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        alibi: Alibi | None = None,
        gated: bool = False,
        dropout: float = 0.0,
        initial: Initial | None = None,
        out_initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim, self.rotary, self.window = head_dim, rotary, window
        self.partial_rotary = partial_rotary
        self.scale, self.soft_cap, self.gated, self.dropout = scale, soft_cap, gated, dropout
        here = heads // alone_or(state).tensor_size
        first = alone_or(state).tensor_index * here
        self.alibi = None if alibi is None else alibi.of_heads(first, first + here)
        self.state, self.whole_width = alone_or(state), heads * head_dim
        widths = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        widths |= {"gate": heads * head_dim} if gated else {}
        self.qkv = ColumnParallelLinear(
            hidden_size, widths, qkv_bias, unit=head_dim, shared=("k", "v"), initial=initial, state=state
        )
        self.q_norm, self.k_norm = (qk_norm(n) if qk_norm else nn.Identity() for n in (heads, kv_heads))
        self.shared = SharedHeads(heads, kv_heads, state=state)
        self.sinks = Sinks(heads, initial=initial, state=state) if sinks else None
        self.out = RowParallelLinear(
            widths["q"], hidden_size, out_bias, unit=head_dim, initial=out_initial or initial, state=state
        )

    @property
    def one_graph(self) -> bool:
        """Return whether ``torch.compile`` can make one graph of it.

        It cannot over context ranks, and where tensor ranks draw dropout's masks of their own.
        """
        return self.state.context_size == 1 and not (self.dropout and self.state.tensor_size > 1)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the attention of ``x``, of the same shape."""
        q_BSF, k_BSF, v_BSF, *gate_BSF = self.qkv(x_BSD)
        q_BHSE, k_BKSE, v_BKSE = (split_heads(t, self.head_dim) for t in (q_BSF, k_BSF, v_BSF))
        q_BHSE, k_BKSE = self.q_norm(q_BHSE), self.k_norm(k_BKSE)
        if self.rotary is not None:
            rope = inputs.rope(self.rotary)
            q_BHSE, k_BKSE = rope(q_BHSE), rope(k_BKSE)
        scope = inputs.scope(self.window)
        k_BKSE, v_BKSE = map(self.shared, scope.extend(self, k_BKSE, v_BKSE))
        dropout = self.dropout if self.training else 0.0
        with own_random(self.state, split=dropout > 0):
            heads_BHSE = causal_attention(
                q_BHSE,
                k_BKSE,
                v_BKSE,
                scope,
                dropout=dropout,
                scale=self.scale,
                soft_cap=self.soft_cap,
                sinks=None if self.sinks is None else local(self.sinks.weight),
                alibi=self.alibi,
                backend=self.backend,
            )
        merged_BSF = merge_heads(heads_BHSE)
        for one in gate_BSF:
            merged_BSF = merged_BSF * one.sigmoid()
        out: Tensor = self.out(merged_BSF)
        return out

    def prepare(self, q_BHSE: Tensor, scope: AttentionScope) -> None:
        """Make what this layer needs of the scope, for queries of this shape, dtype and device."""
        backend = checked_backend(self.call(q_BHSE, scope), self.backend, q_BHSE.device, self.state)
        scope.prepare(backend, q_BHSE, self.head_dim)

    def call(self, q_BHSE: Tensor, scope: AttentionScope) -> AttentionCall:
        """Describe this layer's call of attention, for the choice of its backend."""
        dropout = self.dropout if self.training else 0.0
        score = score_name(soft_cap=self.soft_cap is not None, sinks=self.sinks is not None, alibi=self.alibi)
        return call_of(q_BHSE, self.head_dim, scope, dropout=dropout, score=score, width=self.head_dim)

    def cost(self, tokens: Tokens) -> Cost:
        """Add up projections, norms, and attention's own: what it keeps and sends over context ranks."""
        query, key_value = (part.here for part in self.qkv.parts[:2])
        heads, key_heads = query // self.head_dim, key_value // self.head_dim
        made = tokens.after(self.qkv)
        norms = cost_of(self.q_norm, made.times(heads)) + cost_of(self.k_norm, made.times(key_heads))
        gate = tokens.bytes(query * self.gated)  # whose gradient waits for that of the other products
        made = made.after(self.q_norm, self.k_norm)
        scores = self._cost_of_scores(made, query, key_value)
        made = made if self.sinks is None else made.after(self.sinks)
        inside = norms.beside(tokens.bytes(query + 2 * key_value)) + scores.under(made)
        return cost_of(self.qkv, tokens) + inside.beside(gate) + cost_of(self.out, made)

    def cache_bytes(self, tokens: Tokens) -> float:
        """Return the bytes that a ``KeyValueCache`` of these tokens keeps: keys and values."""
        return 2 * tokens.bytes(self.qkv.parts[1].here)

    def planned_backend(self, tokens: Tokens) -> Backend:
        """Return the backend on one context rank, for rows of one document."""
        call = self.call(torch.empty((1, 1, 1, 0), device="meta"), AttentionScope())
        return choose_backend(call_in_plan(call, tokens, self.window), self.backend)

    def _cost_of_scores(self, tokens: Tokens, query: int, key_value: int) -> Cost:
        ranks, whole = self.state.context_size, tokens.length * self.state.context_size
        heads, count = query // self.head_dim, tokens.count
        narrow = exceeds(self.window, int(whole))
        backend = "blockwise" if ranks > 1 else self.planned_backend(tokens)
        in_blocks, by_sdpa = backend == "blockwise", backend not in ("blockwise", "varlen", "flex")
        bounded = self.soft_cap is not None or self.alibi is not None
        written_out = in_blocks and (bounded or self.dropout > 0 or narrow)
        one_operator = not in_blocks and backend != "math" and (tokens.fused or not self.dropout)
        # Key/value heads as attention is given them: lined up, or one for each query head.
        repeated = by_sdpa and (narrow or not one_operator or (tokens.fused and tokens.compute > 2))
        seen = query if repeated else self.shared.heads * self.head_dim if self.shared.picks else key_value
        kept = tokens.bytes(query + 2 * seen) + heads * count * tokens.inner  # and a logsumexp a head
        # Its output is the last product's input, unless that is a copy of one that lies in memory as norms of
        # single heads leave queries, heads before tokens.
        laid = self.partial_rotary or isinstance(self.q_norm, nn.Identity | HeadsRMSNorm)
        copied = not laid and not (in_blocks and ranks == 1)
        own = copied or self.gated or not self.out.keeps_input
        kept += tokens.bytes(query * own)
        kept += tokens.bytes(query * (1 + copied) * self.gated)  # the gate, and what it multiplies if copied
        scores = heads * whole * count * tokens.compute * (not one_operator and not in_blocks)
        kept += 3 * scores  # the scores, their softmax and what dropout leaves of it
        products = query * (1 + self.gated) + 2 * key_value if self.qkv.in_features == tokens.hidden else 0
        sums = heads * count * tokens.inner * one_operator
        # Scores with sinks: the kernel's output and sums are kept, and changed ones are made of them again.
        inside = in_blocks and not written_out and ranks == 1
        kernel = (tokens.bytes(query) + heads * count * tokens.inner) * inside
        numbers = query + 2 * key_value
        written = 0.0
        if written_out:  # in fp32, as what they are computed from
            block = tokens if ranks == 1 else replace(tokens, length=tokens.length / 2)
            drops, bounds = self.dropout > 0, self.soft_cap is not None
            written = scores_bytes(block, heads, block.length, dropout=drops, bounded=bounds)
            written += block.count * numbers * tokens.inner * (tokens.compute < tokens.inner)
        if ranks > 1:
            working = context_working(tokens, query, 2 * key_value, query, self.state, scores=written)
            working += tokens.bytes(query * (not copied))  # the output
        else:  # the output and its gradient, and the gradients of queries, keys and values
            inner = count * numbers * tokens.inner
            working = tokens.bytes(query * (2 - copied)) + (
                inner if in_blocks else tokens.bytes(query + 2 * seen)
            )
            working += scores + written
        return Cost(
            kept=kept,
            selective=tokens.bytes(products + query * one_operator) + sums + kernel,
            working=working,
            moved=tokens.bytes(query * (ranks > 1 and not own)),  # the output, before it is whole
            sends=context_sends(tokens, 2 * key_value, self.state),
            attention=4.0 * self.whole_width * whole * count,
        )


class SharedHeads:
    """Line up key/value heads with this rank's query heads if the tensor axis does not divide them.

    ``ColumnParallelLinear(shared=...)`` gives each rank the key/value heads that its query heads need. If
    those do not serve runs of query heads of equal length, they are repeated one by one here; otherwise
    nothing is done.
    """

    def __init__(self, query_heads: int, key_value_heads: int, *, state: ParallelState | None = None) -> None:
        state = alone_or(state)
        size, index = state.tensor_size, state.tensor_index
        group, here = query_heads // key_value_heads, query_heads // size
        shared = shared_units(key_value_heads, size, index)
        needed = [q // group - shared.start for q in range(index * here, (index + 1) * here)]
        held = len(shared)
        even = here % held == 0 and needed == [j // (here // held) for j in range(here)]
        self._pick = None if even else HostNumbers(needed)
        #: ``picks``: heads are picked one by one. ``heads``: their number afterwards.
        self.picks, self.heads = not even, held if even else len(needed)

    def __call__(self, x_BKSE: Tensor) -> Tensor:
        if self._pick is None:
            return x_BKSE
        return x_BKSE.index_select(1, self._pick.on(x_BKSE.device, torch.int64))
