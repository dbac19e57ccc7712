"""Define a Mamba-2 layer: a selective state space between a short convolution and a gated norm.

A state S (state dim x head dim) starts at 0. Each token t decays it and adds to it: S <- a_t S + B_t x_t^T;
its output is S^T C_t. Within a chunk all pairs of tokens are computed at once, as attention without softmax;
between chunks the state is handed on. Source: Dao and Gu 2024 (section 6).

B batch  S sequence  D hidden  R runs  L tokens of a run  C chunks  T tokens of a chunk
H heads here  G groups of heads here  P head dim  N state dim
"""

from functools import partial
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...parallel_state import Constant, Cut, DeclaredModule, Initial, LogUniform, ParallelState, local
from ..attention.inputs import AttentionInputs
from ..autocast import without_autocast
from ..head_groups import HeadGroups
from ..norm import HeadsRMSNorm
from ..parallel_linear import ColumnParallelLinear, RowParallelLinear
from .convolution import CausalConvolution
from .decay import Decay, in_chunks
from .runs import Runs


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
        super().__init__(state)
        self.head_dim, self.state_dim = head_dim, state_dim
        self.groups = HeadGroups(heads, groups, self.state)
        mixed = {"x": heads * head_dim, "B": groups * state_dim, "C": groups * state_dim}
        units = {"x": head_dim, "B": state_dim, "C": state_dim}
        common: dict[str, Any] = {"initial": initial, "state": state}
        widths, inner = {"z": mixed["x"], **mixed, "dt": heads}, {"z": head_dim, **units, "dt": 1}
        shared = ("B", "C")
        self.inner = ColumnParallelLinear(hidden_size, widths, bias, unit=inner, shared=shared, **common)
        self.conv = CausalConvolution(
            mixed, kernel_size, act=act, bias=conv_bias, unit=units, shared=shared, **common
        )
        ones = Constant(1.0)
        for name, start in (("A_log", LogUniform(1.0, 16.0)), ("dt_bias", ones), ("D", ones)):
            self.declare(name, (heads,), Cut(0), initial=start)
        self.norm = HeadsRMSNorm(heads, head_dim, eps, groups=groups, state=state)
        self.out = RowParallelLinear(mixed["x"], hidden_size, bias, unit=head_dim, **common)

    @property
    def one_graph(self) -> bool:
        """Return whether ``torch.compile`` can make one graph of it: on one context rank."""
        return self.state.context.size == 1

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the mixer's output for ``x``, of the same shape."""
        runs = Runs(inputs, self.state)
        z, x, b, c, dt = self.inner(x_BSD)
        x, b, c = self.conv((x, b, c), runs)
        inner = torch.promote_types(x_BSD.dtype, torch.float32)
        dt = F.softplus(dt.to(inner) + local(self.dt_bias))
        decay = -local(self.A_log).to(inner).exp() * dt
        x_BSHP = x.unflatten(-1, (-1, self.head_dim))
        b_BSGN, c_BSGN = (flat.unflatten(-1, (-1, self.state_dim)) for flat in (b, c))
        rule = partial(state_space, groups=self.groups)
        y_BSHP = runs.recurrence(self, rule, x_BSHP * dt.unsqueeze(-1), decay, b_BSGN, c_BSGN)
        y_BSHP = (y_BSHP + x_BSHP * local(self.D).unsqueeze(-1)).to(x_BSD.dtype)
        y_BSHP = y_BSHP * F.silu(z).view_as(y_BSHP)
        y_BSHP = self.norm(y_BSHP.transpose(1, 2)).transpose(1, 2)
        return self.out(y_BSHP.flatten(-2))


@without_autocast
def state_space(
    x_RLHP: Tensor,
    log_decay_RLH: Tensor,
    into_RLGN: Tensor,
    out_RLGN: Tensor,
    runs: Runs,
    first: Tensor | None = None,
    *,
    groups: HeadGroups | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (R, L, H, P) and the state after each run (R, H, N, P), in at least fp32.

    ``into_RLGN`` and ``out_RLGN``: B and C, which the heads of a group share. ``first``: the state before
    each row; the default: 0. ``groups``: which heads share them; the default: all. Collective over the
    context ranks, in backward too.
    """
    groups = groups or HeadGroups(x_RLHP.shape[2], 1, ParallelState.alone())
    inner = torch.promote_types(x_RLHP.dtype, torch.float32)
    length = x_RLHP.shape[1]
    x = in_chunks(x_RLHP.to(inner).transpose(1, 2), 2)  # (R, H, C, T, P)
    # (R, G, C, T, N)
    b, c = (in_chunks(tensor.to(inner).transpose(1, 2), 2) for tensor in (into_RLGN, out_RLGN))
    pairs, b, c = groups.spread(c @ b.mT), groups.spread(b), groups.spread(c)
    decays = Decay(in_chunks(log_decay_RLH.to(inner).transpose(1, 2), 2), runs.places)

    written = b.mT @ (x * decays.after.unsqueeze(-1))  # (R, H, C, N, P)
    before, last = runs.states(mul, decays.through[..., None, None], written, first)  # (R, H, C, N, P)
    y = (pairs * decays.between) @ x + (c @ before) * decays.before.unsqueeze(-1)
    return y.flatten(2, 3)[:, :, :length].transpose(1, 2), last
