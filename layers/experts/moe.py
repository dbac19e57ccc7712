"""Define a mixture of experts, which replaces the feed-forward net of a block."""

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...parallel_state import DeclaredModule, Initial, ParallelState, Uniform, alone_or, local, require
from ..collectives import enter_tensor, leave_tensor
from ..mlp import GatedMLP
from .dispatch import Dispatch
from .experts import Experts
from .router import TopKRouter


class GatedShared(DeclaredModule):
    """Compute ``sigmoid(gate(x)) * net(x)``: shared experts with one gate for all of them (Qwen2-MoE).

    Input: (B, S, D), whole on every tensor rank, as for ``net``, a ``GatedMLP`` with ``entered``. Output: (B,
    S, D), partial over the tensor ranks.
    """

    gate: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        net: GatedMLP,
        *,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__(state)
        self.net = net
        initial = initial or Uniform(1 / sqrt(hidden_size))
        # It multiplies a term of a sum, so its gradient is one, too.
        self.declare("gate", (1, hidden_size), partial=("tensor",), initial=initial)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the gated output of ``net``, of the shape of ``x``."""
        y_BSD: Tensor = self.net(x_BSD)
        return torch.sigmoid(F.linear(x_BSD, local(self.gate))) * y_BSD


class MoE(nn.Module):
    """Send each token through the experts that ``router`` chose for it, and add their weighted outputs.

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism. On one device it needs no
    process group. With ``layout.expert`` > 1 the experts are shared out over that many ranks, which exchange
    their tokens: forward and backward are collective over the expert group. No token is dropped, whatever the
    load. Every token also passes ``shared``, if there is one: a ``GatedMLP`` with ``entered``, alone or in a
    ``GatedShared``. It shares the two collectives of the tensor axis with the routed experts. Raises
    ``BadInput`` for a shared net with collectives of its own.
    """

    def __init__(
        self,
        router: TopKRouter,
        experts: Experts,
        *,
        shared: GatedMLP | GatedShared | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        net = shared.net if isinstance(shared, GatedShared) else shared
        entered, actual = getattr(net, "entered", net is None), "one with collectives of its own"
        require(entered, "MoE", "shared", "a GatedMLP with entered=True", actual)
        self.state = alone_or(state)
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the weighted outputs of the experts, of the shape of ``x``."""
        whole_BSD = enter_tensor(x_BSD, self.state)
        weights_BSK, experts_BSK = self.router(whole_BSD)
        way = Dispatch(experts_BSK.flatten(0, 1), self.router.num_experts, state=self.state)
        rows_MD = way.to_experts(whole_BSD.flatten(0, 1))
        made_NKD = way.back(self.experts(rows_MD, way.counts))
        y_ND = (made_NKD * weights_BSK.flatten(0, 1).unsqueeze(-1)).sum(1)
        y_BSD = y_ND.to(x_BSD.dtype).view_as(whole_BSD)
        if self.shared is not None:
            y_BSD = y_BSD + self.shared(whole_BSD)
        return leave_tensor(y_BSD, self.state)
