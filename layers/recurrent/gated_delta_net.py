"""Define a gated delta net: linear attention whose state is corrected by each token, not only added to.

B batch  S sequence  D hidden  K key heads here  H value heads here  E key dim  V value dim
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...parallel_state import (
    BadInput,
    Constant,
    Cut,
    Declaration,
    DeclaredModule,
    Initial,
    LogUniform,
    ParallelState,
    alone_or,
    declare_parameter,
    local,
)
from ..attention.inputs import AttentionInputs
from ..collectives import enter_sends, enter_tensor
from ..column_parallel_linear import ColumnParallelLinear
from ..cost import Cost, Send, Tokens, cost_of
from ..norm import RMSNorm
from ..row_parallel_linear import RowParallelLinear
from .convolution import CausalConvolution
from .decay import CHUNK
from .delta_rule import gated_delta_rule
from .recompute import recomputed
from .runs import Runs, states_sends


class GatedDeltaNet(DeclaredModule):
    """Compute the gated delta rule between a short convolution and a gated norm (Qwen3-Next).

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism. Each tensor rank computes
    whole key heads with the ``value_heads / key_heads`` value heads of each. The state starts anew with each
    document, is handed on from context rank to context rank (see ``Runs``), and is kept in the cache.

    Parameters: the products ``qkvz`` (queries, keys, values, output gate) and ``ba`` (write strength, decay),
    ``conv`` over queries, keys and values, ``A_log`` and ``dt_bias`` a value head, ``norm``, ``out``. The
    rule itself is plain torch in chunks of 64 tokens on every device; backward computes it again. Source:
    Yang et al. 2024.
    """

    #: ``torch.compile`` mistakes how the output of the triangular solver lies in memory.
    one_graph = False

    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel_size: int,
        act: str = "silu",
        eps: float = 1e-6,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        if value_heads % key_heads:
            expected = f"a multiple of key_heads={key_heads}"
            raise BadInput("GatedDeltaNet", "value_heads", expected=expected, found=value_heads)
        self.state, self.key_dim, self.value_dim = alone_or(state), key_dim, value_dim
        units = {"q": key_dim, "k": key_dim, "v": value_heads // key_heads * value_dim}
        widths = {name: key_heads * unit for name, unit in units.items()}
        self.qkvz = ColumnParallelLinear(
            hidden_size,
            widths | {"z": widths["v"]},
            bias=False,
            unit=units | {"z": units["v"]},
            entered=True,
            initial=initial,
            state=state,
        )
        self.ba = ColumnParallelLinear(
            hidden_size,
            {"b": value_heads, "a": value_heads},
            bias=False,
            unit=value_heads // key_heads,
            entered=True,
            initial=initial,
            state=state,
        )
        self.conv = CausalConvolution(widths, kernel_size, act=act, unit=units, initial=initial, state=state)
        heads = Declaration((value_heads,), Cut(0, unit=value_heads // key_heads))
        for name, start in (("A_log", LogUniform(0.01, 16.0)), ("dt_bias", Constant(1.0))):
            declare_parameter(self, name, replace(heads, initial=start), self.state)
        self.norm = RMSNorm(value_dim, eps, heads=True, state=state)
        self.out = RowParallelLinear(
            widths["v"], hidden_size, bias=False, unit=units["v"], initial=initial, state=state
        )

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the delta net of ``x``, of the same shape."""
        runs = Runs(inputs, self.state)
        whole_BSD = enter_tensor(x_BSD, self.state)
        q, k, v, z = self.qkvz(whole_BSD)
        b, a = self.ba(whole_BSD)
        q, k, v = self.conv((q, k, v), runs)
        inner = torch.promote_types(x_BSD.dtype, torch.float32)
        decay = -local(self.A_log).to(inner).exp() * F.softplus(a.to(inner) + local(self.dt_bias))
        y_BSHV = self._rule(runs, q, k, v, decay, b.sigmoid())
        y_BSHV = self.norm(y_BSHV.to(x_BSD.dtype)) * F.silu(z.unflatten(-1, (-1, self.value_dim)))
        out: Tensor = self.out(y_BSHV.flatten(-2))
        return out

    def cost(self, tokens: Tokens) -> Cost:
        """Add up products, convolution, norm, and the rule, of which backward needs the inputs alone.

        The rule's FLOPs are ``other``: the conventions of MFU know matrices and scores.
        """
        (query, _, value, _), heads = (part.here for part in self.qkvz.parts), self.ba.parts[0].here
        hidden = self.qkvz.in_features
        twice = self.qkvz.keeps_input and self.ba.keeps_input  # the same input
        found = Cost(sends=enter_sends(tokens, hidden, self.state))
        found += cost_of(self.qkvz, tokens).beside(tokens.bytes(hidden))  # its gradient by ``ba``
        found += Cost(kept=-tokens.bytes(hidden) * twice)
        found += cost_of(self.ba, tokens).beside(tokens.bytes(2 * query + 2 * value))
        # Queries, keys and values as the rule takes them.
        kept = tokens.bytes(2 * query + value + heads)
        kept += 3 * heads * tokens.count * tokens.inner  # the decay, and both sides of its softplus
        products = tokens.bytes(2 * query + 2 * value + 2 * heads) if hidden == tokens.hidden else 0.0
        mixed = tokens.after(self.qkvz)
        states = mixed.after(self.conv, self.ba).after(self.A_log, self.dt_bias)
        inside = cost_of(self.conv, mixed) + Cost(
            kept=kept + 2 * heads * tokens.inner,
            selective=products,
            sends=self._sends(states, heads),
            working=self._working(tokens, query, heads) + value * tokens.count * tokens.inner,
            other=self._flops(tokens),
        )
        inside += cost_of(self.norm, states.times(heads))
        # The gate's gradient waits for that of the other products.
        found += inside.beside(tokens.bytes(value))
        gate = tokens.bytes(3 * value)  # the norm's output, and both sides of its gate
        return found + Cost(kept=gate, working=gate) + cost_of(self.out, states.after(self.norm))

    def cache_bytes(self, tokens: Tokens) -> float:
        """Return the bytes that a ``KeyValueCache`` keeps: each row's state, however many tokens it has."""
        return tokens.rows * self.ba.parts[0].here * self.key_dim * self.value_dim * tokens.inner

    def _working(self, tokens: Tokens, query: int, heads: int) -> float:
        """Return the bytes that the rule's own backward holds, its output among them: at the product of
        queries, keys and decays (``own``), or at the triangular system.

        Both hold three matrices of a chunk's pairs for each head, and the gradients of three; what else they
        hold is as in ``gated_delta_rule``.
        """
        length, key, value = min(CHUNK, tokens.length), self.key_dim, self.value_dim
        pairs = query // key * length  # products of keys, or of queries and keys
        states = key * (key + 2 * value) / length
        own = 6 * query + 3 * pairs + heads * (2 * (key + value) + 2 * value + 3 * key + states)
        system = 5 * query + pairs + heads * (4 * (key + value) + value)
        numbers = 6 * heads * length + max(own, system) + 4 * heads + 2 * query // key
        numbers += 2 * query * (tokens.compute < tokens.inner)  # queries and keys in fp32
        return tokens.count * tokens.inner * numbers

    def _flops(self, tokens: Tokens) -> float:
        """Return the products of the rule: of all pairs in a chunk, with the state, and between chunks."""
        length, key, value = min(CHUNK, tokens.length), self.key_dim, self.value_dim
        size = self.state.tensor_size
        shared = 4 * self.qkvz.parts[0].here * length
        each = length * (key + 3 * value) + key * (2 * key + 6 * value) + 2 * key * key * value / length
        return tokens.count * size * (shared + self.ba.parts[0].here * each)

    def _sends(self, tokens: Tokens, heads: int) -> tuple[Send, ...]:
        """Return what context ranks tell each other of what their runs make of a state, see ``Runs``."""
        maps = tokens.rows * 2 * heads * self.key_dim * (self.key_dim + self.value_dim) * tokens.inner
        return states_sends(maps, tokens, self.state)

    def _rule(self, runs: Runs, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Return the outputs of the rule, (B, S, H, V)."""
        heads = (self.key_dim, self.key_dim, self.value_dim)
        q, k, v = (
            runs.cut(one.unflatten(-1, (-1, width))) for one, width in zip((q, k, v), heads, strict=True)
        )
        decay, beta = runs.cut(decay), runs.cut(beta)
        if runs.cache is not None:
            y, last = gated_delta_rule(q, k, v, decay, beta, runs, runs.recall(self))
            runs.remember(self, last)
            return y

        def rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
            return gated_delta_rule(q, k, v, decay, beta, runs)[0]

        return runs.join(recomputed(rule, q, k, v, decay, beta))
