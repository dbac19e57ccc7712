"""Attention as a layer: projections, rotation, causal attention and output, whole heads on each rank; and the
backends that a model's layers get.

B batch  S sequence  D hidden  E head dim  H query heads here  K key/value heads here
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...parallel_state import Constant, Cut, DeclaredModule, Initial, ParallelState, alone_or, require
from ..dropout import own_random
from ..head_groups import HeadGroups
from ..parallel_linear import ColumnParallelLinear, RowParallelLinear
from .backends import AttentionCall, PinnedBackend, choose_backend
from .causal import causal_attention, merge_heads, split_heads
from .inputs import AttentionInputs
from .kernel_checks import checked_backend
from .mask import AttentionScope
from .scores import Alibi, Scores
from .visible import exceeds


class AttentionLayer(nn.Module):
    """Base of the attention layers: what they do with queries, keys and values of this rank's heads.

    ``heads``: number of query heads of all ranks. ``key_dim``: width of a head of queries and keys;
    ``value_dim``: that of a head of values. ``trained``: what becomes of the scores in training, but for the
    sinks. ``window``: number of tokens that a token sees, itself included; ``None``: all earlier ones.
    """

    #: What computes it, see ``backends.py``; ``set_attention_backend`` pins it.
    backend: PinnedBackend = "auto"
    #: One more score of each head, which is learnt.
    sinks: DeclaredModule | None
    out: RowParallelLinear

    def __init__(
        self,
        heads: int,
        key_dim: int,
        value_dim: int,
        trained: Scores,
        *,
        window: int | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.key_dim, self.value_dim, self.state = heads, key_dim, value_dim, alone_or(state)
        self.trained, self.window = trained, window
        require(window is None or window >= 1, "attention", "window", "at least 1", window)

    @property
    def one_graph(self) -> bool:
        """Return whether ``torch.compile`` can make one graph of it.

        It cannot over context ranks, and where tensor ranks draw dropout's masks of their own.
        """
        return self.state.context.size == 1 and not (self.trained.dropout and self.state.tensor.size > 1)

    @property
    def scores(self) -> Scores:
        """Return what becomes of the scores, in the mode that the layer is in."""
        sinks = None if self.sinks is None else self.sinks.here()
        return self.trained._replace(sinks=sinks, dropout=self.trained.dropout if self.training else 0.0)

    def attend(self, q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, scope: AttentionScope) -> Tensor:
        """Return the heads' outputs, side by side: (B, S, heads here * value_dim)."""
        scores = self.scores
        with own_random(self.state, split=scores.dropout > 0):
            y_BHSE = causal_attention(q_BHSE, k_BKTE, v_BKTE, scope, **scores._asdict(), backend=self.backend)
        return merge_heads(y_BHSE)

    def prepare(self, like: Tensor, length: int, scope: AttentionScope) -> None:
        """Make what this layer needs of the scope, for rows of ``length`` tokens, as many as ``like`` has."""
        call = self.call(like.device.type, like.dtype, scope.masked, scope.cached)
        backend = checked_backend(call, self.backend, like.device)
        scope.takes(backend, like.new_empty(1).expand(len(like), 1, length, self.key_dim))

    def call(
        self, device: str, dtype: torch.dtype, masked: bool = False, cached: bool = False
    ) -> AttentionCall:
        """Describe this layer's call of attention, for the choice of its backend."""
        dropout, score, widths = self.scores.dropout > 0, self.scores.kind, (self.key_dim, self.value_dim)
        return AttentionCall(device, dtype, *widths, masked, cached, dropout, score)


class Attention(AttentionLayer):
    """Compute causal self-attention, in which several query heads may share a key/value head.

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism. Each tensor rank computes
    whole heads. Key/value heads that the ranks do not divide are shared (see ``ColumnParallelLinear``).

    ``kv_heads``: number of key/value heads; the default is ``heads``. ``qk_norm``: makes, from the number
    of heads, the norm of the queries and that of the keys, (B, heads here, S, E) in and out, which comes
    before the rotation (Qwen 3). ``rotary``: name of the rotation in ``AttentionInputs``; ``None``: no
    rotation (GPT-2). ``window``: see ``AttentionLayer``. ``scale``, ``soft_cap``, ``dropout`` and ``alibi``,
    which is that of all heads: see ``causal_attention``. ``sinks``: each head has one more score, which is
    learnt (GPT-OSS). ``gated``: the sigmoid of one more product of the input multiplies each number of the
    heads (Qwen3-Next; Qiu et al. 2025). ``initial`` and ``out_initial``: initial weights of the input and of
    the output projection. Source: Ainslie et al. 2023 (grouped queries).
    """

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
        kv_heads = heads if kv_heads is None else kv_heads
        rank_heads = heads // alone_or(state).tensor.size
        first = alone_or(state).tensor.index * rank_heads
        alibi = None if alibi is None else alibi.of_heads(first, first + rank_heads)
        trained = Scores(scale, soft_cap, alibi=alibi, dropout=dropout)
        super().__init__(heads, head_dim, head_dim, trained, window=window, state=state)
        self.rotary = rotary
        widths = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        widths |= {"gate": heads * head_dim} if gated else {}
        self.qkv = ColumnParallelLinear(
            hidden_size, widths, qkv_bias, unit=head_dim, shared=("k", "v"), initial=initial, state=state
        )
        self.q_norm, self.k_norm = (qk_norm(n) if qk_norm else nn.Identity() for n in (heads, kv_heads))
        self.groups = HeadGroups(heads, kv_heads, self.state)
        self.sinks = DeclaredModule(state) if sinks else None
        if self.sinks is not None:
            self.sinks.declare("weight", (heads,), Cut(0), initial=initial or Constant(0.0))
        self.out = RowParallelLinear(
            widths["q"], hidden_size, out_bias, unit=head_dim, initial=out_initial or initial, state=state
        )

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the attention of ``x``, of the same shape."""
        q_BSF, k_BSF, v_BSF, *gate_BSF = self.qkv(x_BSD)
        q_BHSE, k_BKSE, v_BKSE = (split_heads(t, self.key_dim) for t in (q_BSF, k_BSF, v_BSF))
        q_BHSE, k_BKSE = self.q_norm(q_BHSE), self.k_norm(k_BKSE)
        if self.rotary is not None:
            rope = inputs.rope(self.rotary)
            q_BHSE, k_BKSE = rope(q_BHSE), rope(k_BKSE)
        scope = inputs.scope(self.window)
        k_BKSE, v_BKSE = scope.extend(self, k_BKSE, v_BKSE)
        if not self.groups.even:  # as the tensor axis may cut them; kernels take runs of equal length
            k_BKSE, v_BKSE = self.groups.spread(k_BKSE), self.groups.spread(v_BKSE)
        merged_BSF = self.attend(q_BHSE, k_BKSE, v_BKSE, scope)
        for gate in gate_BSF:
            merged_BSF = merged_BSF * gate.sigmoid()
        return self.out(merged_BSF)


def attention_kinds(model: nn.Module) -> tuple[AttentionLayer, ...]:
    """Return one attention layer of each kind; layers of one kind have the same window and equal calls."""
    kinds: dict[object, AttentionLayer] = {}
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            kinds.setdefault((module.window, module.call("meta", torch.float32)), module)
    return tuple(kinds.values())


def set_attention_backend(model: nn.Module, backend: PinnedBackend) -> None:
    """Let all attention layers of ``model`` be computed by ``backend``."""
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            module.backend = backend


def attention_calls(
    model: nn.Module,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    length: int,
    packed: bool,
    backend: PinnedBackend = "auto",
) -> dict[str, AttentionCall]:
    """Return the call of each kind of attention, by its name in words, in rows of ``length`` tokens.

    ``packed``: rows hold several documents. Needs no device. Raises ``BadInput`` if the pinned ``backend``
    cannot compute one of them.
    """
    calls: dict[str, AttentionCall] = {}
    for module in attention_kinds(model):
        narrow = exceeds(module.window, length)
        call = module.call(torch.device(device).type, dtype, masked=packed or narrow)
        words = [f"window {module.window}"] * narrow + ["several documents a row"] * packed + [call.score]
        choose_backend(call, backend)
        calls[", ".join(filter(None, words)) or "one document a row"] = call
    return calls
