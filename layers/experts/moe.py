"""Define a mixture of experts, which replaces the feed-forward net of a block."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...parallel_state import (
    Declaration,
    DeclaredModule,
    Initial,
    ParallelState,
    Uniform,
    alone_or,
    declare_parameter,
    local,
)
from ..collectives import enter_sends, enter_tensor, leave_sends, leave_tensor
from ..cost import Cost, Tokens, cost_of, matrix
from ..row_parallel_linear import RowParallelLinear
from .dispatch import Dispatch
from .experts import Experts
from .router import TopKRouter


class MoE(nn.Module):
    """Send each token through the experts that ``router`` chose for it, and add their weighted outputs.

    Input and output: (B, S, D), or (B, S / tensor, D) with sequence parallelism. On one device it needs no
    process group. With ``layout.expert`` > 1 the experts are shared out over that many ranks, which exchange
    their tokens: forward and backward are collective over the expert group. No token is dropped, whatever the
    load. Every token also passes ``shared``, if given, which must return whole sums (a ``GatedMLP``, alone or
    in a ``GatedShared``).
    """

    def __init__(
        self,
        router: TopKRouter,
        experts: Experts,
        *,
        shared: nn.Module | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
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
        y_BSD = leave_tensor(y_ND.to(x_BSD.dtype).view_as(whole_BSD), self.state)
        return y_BSD if self.shared is None else y_BSD + self.shared(x_BSD)

    def cost(self, tokens: Tokens) -> Cost:
        """Add up the router, the experts, and the way of rows there and back. What ranks of experts exchange
        depends on the tokens and is not counted.
        """
        hidden, top_k = tokens.hidden, self.router.top_k
        places = 4 * 8 * top_k  # int64: the experts, their order, and back
        cast = tokens.compute < tokens.inner
        found = Cost(sends=enter_sends(tokens, hidden, self.state))
        found += cost_of(self.router, tokens).beside(tokens.bytes(hidden))  # the rows' gradient, summed
        made = tokens.after(self.router, self.experts)
        experts = cost_of(self.experts, tokens.times(top_k))
        # While the experts run, their rows are there, and the tokens that these are made of.
        rows = tokens.bytes(top_k * hidden * (not self.experts.keeps_input))
        whole = tokens.bytes(hidden * (not self.router.weight.requires_grad))
        found += experts + Cost(making=experts.making + rows + whole)
        total = tokens.count * hidden * tokens.inner * cast  # the rows' sum in fp32, or its gradient
        found += Cost(
            kept=tokens.bytes(top_k * hidden) + places * tokens.count,
            # In fp32, as the weights are: the gradients of the sum, which is the residual stream's if that is
            # in fp32, of the rows, and of the weights before it is summed.
            working=tokens.count * hidden * 2 * top_k * tokens.inner
            + total
            + tokens.bytes(hidden * (top_k * cast + (self.state.sequence))),
            given_back=tokens.bytes(top_k * hidden * cast),  # the rows, when their gradient is cast
            selective=tokens.between_blocks(self.state).bytes(hidden) * (self.state.tensor_size > 1),
            sends=leave_sends(made, hidden, self.state),
            repeated=0 if made.reached else -1,  # what is weighted and summed over the ranks here
        )
        if self.shared is None:  # computing again begins with this gradient, and ends with what is weighted
            return found + Cost(making=found.making + total)
        # In fp32 the router and the shared experts keep the same input.
        trained = self.router.weight.requires_grad
        same = trained and tokens.compute == tokens.inner and not self.state.sequence
        given = tokens.between_blocks(self.state).bytes(hidden)  # the gradient of the shared experts' input
        shared = cost_of(self.shared, tokens)
        found = found.beside(given) + Cost(kept=-tokens.bytes(hidden) * same) + shared
        # The weighted rows and their sum. Then the shared experts, which count what they are given, beside
        # the sum before and after it is cast.
        weighted = tokens.count * (top_k + 1) * hidden * tokens.inner + rows + whole - shared.kept
        return found + Cost(making=max(weighted, shared.making + given + rows + total))


class GatedShared(DeclaredModule):
    """Compute ``sigmoid(gate(x)) * net(x)``: shared experts with one gate for all of them (Qwen2-MoE)."""

    gate: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        net: nn.Module,
        *,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__()
        self.net, self.state = net, alone_or(state)
        # Between the blocks, where each rank has its own tokens under sequence parallelism.
        partial = ("tensor",) if self.state.sequence else ()
        initial = initial or Uniform(1 / sqrt(hidden_size))
        declare_parameter(
            self, "gate", Declaration((1, hidden_size), partial=partial, initial=initial), self.state
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the gated output of ``net``, of the shape of ``x``."""
        y_BSD: Tensor = self.net(x_BSD)
        return torch.sigmoid(F.linear(x_BSD, local(self.gate))) * y_BSD

    def cost(self, tokens: Tokens) -> Cost:
        here, width = tokens.between_blocks(self.state), self.gate.shape[1]
        kept = here.bytes(width + 1)  # what the net makes, the gate
        net = cost_of(self.net, tokens)
        last = getattr(self.net, "down", None)
        if isinstance(last, RowParallelLinear):  # its output is needed, with what adapters add
            net += Cost(making=net.making + last.adding(here))
        if self.gate.requires_grad and self.state.sequence:  # otherwise the net keeps the same input
            kept += here.bytes(width)
        return (
            net.beside(here.bytes(width))
            + matrix(tokens, width, trained=self.gate.requires_grad)
            + Cost(kept=kept, working=here.bytes(3 * width))
        )
