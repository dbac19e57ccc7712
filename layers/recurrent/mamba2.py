"""Define a Mamba-2 layer: a selective state space between a short convolution and a gated norm.

B batch  S sequence  D hidden  H heads here  G groups of heads here  P head dim  N state dim
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...parallel_state import (
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
from ..column_parallel_linear import ColumnParallelLinear
from ..cost import Cost, Send, Tokens, cost_of
from ..head_groups import HeadGroups
from ..norm import HeadsRMSNorm
from ..row_parallel_linear import RowParallelLinear
from .convolution import CausalConvolution
from .decay import CHUNK
from .recompute import recomputed
from .runs import Runs, states_sends
from .state_space import state_space


class Mamba2(DeclaredModule):
    """Compute Mamba-2's mixer: the heads of a group share what a token writes along and reads along (B, C).

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism. Each tensor rank computes
    whole heads, with the B and C of their groups. Each group is normalised by itself; ranks that share one
    sum one number a token and group. The state starts anew with each document, is handed on from context rank
    to context rank (see ``Runs``), and is kept in the cache.

    Parameters: the products ``inner`` (gate z, x, B, C, dt), ``conv`` over x, B and C, ``A_log``, ``dt_bias``
    and ``D`` a head, ``norm``, ``out``. The state space itself is plain torch in chunks of 64 tokens on every
    device; backward computes it again. Source: Dao and Gu 2024.
    """

    A_log: nn.Parameter
    dt_bias: nn.Parameter
    D: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int,
        head_dim: int,
        state_dim: int,
        groups: int = 1,
        kernel_size: int,
        act: str = "silu",
        bias: bool = False,
        conv_bias: bool = True,
        eps: float = 1e-6,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        self.state, self.head_dim, self.state_dim = alone_or(state), head_dim, state_dim
        self.groups = HeadGroups(heads, groups, self.state)
        mixed = {"x": heads * head_dim, "B": groups * state_dim, "C": groups * state_dim}
        units = {"x": head_dim, "B": state_dim, "C": state_dim}
        self.inner = ColumnParallelLinear(
            hidden_size,
            {"z": mixed["x"], **mixed, "dt": heads},
            bias,
            unit={"z": head_dim, **units, "dt": 1},
            shared=("B", "C"),
            initial=initial,
            state=state,
        )
        self.conv = CausalConvolution(
            mixed,
            kernel_size,
            act=act,
            bias=conv_bias,
            unit=units,
            shared=("B", "C"),
            initial=initial,
            state=state,
        )
        each = Declaration((heads,), Cut(0))
        starts: dict[str, Initial] = {
            "A_log": LogUniform(1.0, 16.0),
            "dt_bias": Constant(1.0),
            "D": Constant(1.0),
        }
        for name, start in starts.items():
            declare_parameter(self, name, replace(each, initial=start), self.state)
        self.norm = HeadsRMSNorm(heads, head_dim, eps, groups=groups, state=state)
        self.out = RowParallelLinear(
            mixed["x"], hidden_size, bias, unit=head_dim, initial=initial, state=state
        )

    @property
    def one_graph(self) -> bool:
        """Return whether ``torch.compile`` can make one graph of it: on one context rank."""
        return self.state.context_size == 1

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the mixer's output for ``x``, of the same shape."""
        runs = Runs(inputs, self.state)
        z, x, b, c, dt = self.inner(x_BSD)
        x, b, c = self.conv((x, b, c), runs)
        inner = torch.promote_types(x_BSD.dtype, torch.float32)
        dt = F.softplus(dt.to(inner) + local(self.dt_bias))
        decay = -local(self.A_log).to(inner).exp() * dt
        x_BSHP = x.unflatten(-1, (-1, self.head_dim))
        b_BSGN, c_BSGN = (one.unflatten(-1, (-1, self.state_dim)) for one in (b, c))
        y_BSHP = self._states(runs, x_BSHP * dt.unsqueeze(-1), decay, b_BSGN, c_BSGN)
        y_BSHP = (y_BSHP + x_BSHP * local(self.D).unsqueeze(-1)).to(x_BSD.dtype)
        y_BSHP = y_BSHP * F.silu(z).view_as(y_BSHP)
        y_BSHP = self.norm(y_BSHP.transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.out(y_BSHP.flatten(-2))
        return out

    def cost(self, tokens: Tokens) -> Cost:
        """Add up products, convolution, norm, and the state space, of which backward needs the inputs alone.

        The FLOPs of the state space are ``other``: the conventions of MFU know matrices and scores.
        """
        (value, _, heads), made = (self.inner.parts[n].here for n in (0, 1, 4)), self.inner
        # B, C and x as the convolution made them.
        kept = tokens.bytes(value + 2 * len(self.groups.held) * self.state_dim)
        # x times its step; the step, the sum in its softplus, the decay.
        kept += tokens.count * tokens.inner * (value + 3 * heads) + 3 * heads * tokens.inner
        products = tokens.bytes(sum(part.here for part in made.parts))
        products = products if made.in_features == tokens.hidden else 0.0
        mixed = tokens.after(self.inner)
        states = mixed.after(self.conv).after(self.A_log, self.dt_bias)
        inside = cost_of(self.conv, mixed) + Cost(
            kept=kept,
            selective=products,
            sends=self._sends(states, heads),
            # Beside it the gradients of the states' output, and of x that passes them by.
            working=self._working(tokens, heads) + value * tokens.count * tokens.inner + tokens.bytes(value),
            other=self._flops(tokens),
        )
        summed = states.after(self.D)
        # The gate's gradient; the gate, both sides of its silu and what it multiplies.
        inside = inside.beside(tokens.bytes(value)) + Cost(
            kept=tokens.bytes(3 * value), working=tokens.bytes(3 * value)
        )
        found = cost_of(made, tokens) + inside.under(summed)
        found += cost_of(self.norm, summed.times(heads))
        return found + cost_of(self.out, summed.after(self.norm))

    def cache_bytes(self, tokens: Tokens) -> float:
        """Return the bytes that a ``KeyValueCache`` keeps: each row's state, however many tokens it has."""
        return tokens.rows * self.inner.parts[0].here * self.state_dim * tokens.inner

    def _working(self, tokens: Tokens, heads: int) -> float:
        """Return the bytes that the backward of ``state_space`` itself holds: when it has made the output
        again, or at the product of the pairs with their decays.
        """
        length, width, states = min(CHUNK, tokens.length), self.head_dim, self.state_dim
        groups, carried = len(self.groups.held), states * width / length
        made = heads * (7 * width + 2 * length + 2 * states + 3 * carried) + groups * (4 * states + length)
        pairs = heads * (4 * width + 4 * length + states + 2 * carried) + groups * (3 * states + 2 * length)
        if groups > 1:  # the products of all pairs are spread to the heads before the decays multiply them
            made += (heads - groups) * length
            pairs += (heads - 2 * groups) * length
        return tokens.count * tokens.inner * (max(made, pairs) + 3 * heads)

    def _flops(self, tokens: Tokens) -> float:
        """Return the products: of all pairs in a chunk, into the state and out of it."""
        length, states = min(CHUNK, tokens.length), self.state_dim
        value = self.inner.parts[0].here * self.state.tensor_size
        pairs = 2 * self.groups.groups * states * length
        return tokens.count * (pairs + value * (2 * length + 4 * states))

    def _sends(self, tokens: Tokens, heads: int) -> tuple[Send, ...]:
        """Return what context ranks tell each other of what their runs make of a state, see ``Runs``."""
        maps = tokens.rows * 2 * heads * (self.state_dim + 1) * self.head_dim * tokens.inner
        return states_sends(maps, tokens, self.state)

    def _states(self, runs: Runs, x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Return the outputs of the state space, (B, S, H, P)."""
        x, decay, b, c = (runs.cut(one) for one in (x, decay, b, c))
        if runs.cache is not None:
            y, last = state_space(x, decay, b, c, runs, runs.recall(self), groups=self.groups)
            runs.remember(self, last)
            return y

        def space(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
            return state_space(x, decay, b, c, runs, groups=self.groups)[0]

        return runs.join(recomputed(space, x, decay, b, c))
