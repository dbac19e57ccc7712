"""Define the router of a mixture of experts, which chooses the experts of each token and their weights.

B batch  S sequence  D hidden  E experts  K experts a token  G groups of experts
"""

from collections.abc import Callable
from math import nan, sqrt
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...parallel_state import BUFFER_DTYPE, DeclaredModule, ParallelState, engine, local, require
from ...parallel_state.engine.autograd_and_compiler import in_backward
from ...parallel_state.initial_weights import Initial, Uniform
from ..autocast import without_autocast


class TopKRouter(DeclaredModule):
    """Choose the best ``top_k`` experts for each token and their weights, in at least fp32.

    ``score``: ``softmax`` over the experts, or ``sigmoid`` of each. ``normalize`` divides the chosen scores
    by their sum; ``scale`` multiplies them. With ``groups`` > 1 experts are chosen from the best
    ``groups_kept`` groups only; the score of a group is that of its best expert (softmax) or the sum of its
    best two (sigmoid). ``bias_corrected`` adds a bias to the scores, for the choice only, which ``Balancing``
    moves towards even loads. The bias is fp32 whatever the model's dtype, starts at zero, and is saved with
    the weights. ``biased``: the logits have a trained bias (GPT-OSS).

    Two losses act through their gradients only, once in a backward pass. ``balance`` multiplies, for each row
    by itself, E / S^2 times the sum over the experts of (number of tokens) times (sum of scores, divided by
    the sum over the experts). Over context ranks, which add up their numbers of tokens, it is computed only
    where somebody asks for it: with a factor that is not 0, or with ``bias_corrected``. ``z_loss`` multiplies
    the mean square of the logits' logsumexp. All rows count equally; see ``set_auxiliary_scale``. A router
    counts what it chooses with gradients enabled, be it frozen, and all before it, or not.

    Input: (B, S, D), whole along the sequence and equal on the tensor ranks. The router's weights multiply
    partial sums, so the gradient of its weight is partial on each tensor rank. Output: weights (B, S, K) in
    at least fp32, and experts (B, S, K) int64. Sources: Shazeer et al. 2017; Fedus et al. 2021 (section 2.2);
    Zoph et al. 2022 (z-loss); DeepSeek-V2 and V3 (2024: groups, bias, losses in each sequence).
    """

    #: Its backward counts into ``sums``, which no graph of ``torch.compile`` can.
    one_graph = False

    weight: nn.Parameter
    bias: nn.Parameter | None
    logit_bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        groups_kept: int = 1,
        bias_corrected: bool = False,
        biased: bool = False,
        balance: float = 0.0,
        z_loss: float = 0.0,
        initial: Initial | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__(state)
        _check(num_experts, top_k, score, groups, groups_kept)
        self.num_experts, self.top_k, self.score = num_experts, top_k, score
        self.normalize, self.scale, self.groups, self.groups_kept = normalize, scale, groups, groups_kept
        self.balance, self.z_loss = balance, z_loss
        #: The weight of a row's losses; ``None``: one over the rows of the call.
        self.row_scale: float | None = None
        #: What forwards with gradients have counted, (E + 3,) float64: tokens of each expert; sums over rows
        #: of the balance loss, which is not a number where nobody asks for it, and of the z-loss; rows.
        self.sums: Tensor | None = None
        partial, initial = ("tensor",), initial or Uniform(1 / sqrt(hidden_size))
        self.declare("weight", (num_experts, hidden_size), partial=partial, initial=initial)
        for name in ("bias", "logit_bias"):
            self.register_parameter(name, None)
        if bias_corrected:
            self.declare("bias", (num_experts,), buffer=True)
        if biased:
            self.declare("logit_bias", (num_experts,), partial=partial, initial=initial)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the router to another device or dtype; the bias stays in fp32 without rounding."""
        before = None if self.bias is None else self.bias.detach()
        super()._apply(fn, recurse)
        if before is not None and self.bias is not None and self.bias.dtype != BUFFER_DTYPE:
            self.bias.data = before.to(self.bias.device)
        return self

    @without_autocast
    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of the chosen experts, both (B, S, K)."""
        inner = torch.promote_types(x_BSD.dtype, torch.float32)
        logits_BSE = F.linear(x_BSD.to(inner), local(self.weight).to(inner))
        if self.logit_bias is not None:
            logits_BSE = logits_BSE + local(self.logit_bias).to(inner)
        scores_BSE = logits_BSE.softmax(-1) if self.score == "softmax" else logits_BSE.sigmoid()
        experts_BSK = self.choose(scores_BSE.detach())
        weights_BSK = scores_BSE.gather(-1, experts_BSK)
        if self.normalize:
            weights_BSK = weights_BSK / (weights_BSK.sum(-1, keepdim=True) + 1e-20)
        weights_BSK = weights_BSK * self.scale
        if torch.is_grad_enabled():
            weights_BSK = self._with_losses(weights_BSK, experts_BSK, scores_BSE, logits_BSE)
        return weights_BSK, experts_BSK

    def choose(self, scores_BSE: Tensor) -> Tensor:
        """Return the ``top_k`` experts of each token by score, bias and groups."""
        if self.bias is not None:
            # With offloaded weights the bias stays on the host; FSDP does not move it.
            scores_BSE = scores_BSE + self.bias.detach().to(scores_BSE.device, non_blocking=True)
        if self.groups > 1:
            grouped = scores_BSE.unflatten(-1, (self.groups, -1))
            counted = 1 if self.score == "softmax" else min(2, grouped.shape[-1])
            best_BSG = grouped.topk(counted, dim=-1).values.sum(-1)
            kept_groups = best_BSG.topk(self.groups_kept, dim=-1, sorted=False).indices
            out_BSG = torch.ones_like(best_BSG, dtype=torch.bool).scatter_(-1, kept_groups, False)
            scores_BSE = grouped.masked_fill(out_BSG.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores_BSE.topk(self.top_k, dim=-1).indices

    def _with_losses(
        self, weights_BSK: Tensor, experts_BSK: Tensor, scores_BSE: Tensor, logits_BSE: Tensor
    ) -> Tensor:
        """Return the same weights; their backward also runs the losses' backward and counts the choices.

        A forward would count twice if it is recomputed to save memory. Where nothing so far is trained no
        backward comes (in a pipeline it may), and the forward that runs outside of a backward counts.
        """
        rows, state = len(weights_BSK), self.state
        length = weights_BSK.shape[1] * state.layout.context
        with torch.no_grad():
            counts_BE = torch.zeros_like(scores_BSE[:, 0]).scatter_add_(
                1, experts_BSK.flatten(1), torch.ones_like(weights_BSK).flatten(1)
            )
        z = logits_BSE.logsumexp(-1).square().sum() / length
        loss, balance = z * self.z_loss, torch.full_like(z, nan)
        if state.layout.context == 1 or self.balance or self.bias is not None:
            total_BE = counts_BE
            if state.layout.context > 1:
                total_BE = engine.all_reduce(counts_BE, state.context.group)
            softmax = self.score == "softmax"
            shares_BSE = scores_BSE if softmax else scores_BSE / scores_BSE.sum(-1, keepdim=True)
            balance = (total_BE * shares_BSE.sum(1)).sum() * (self.num_experts / length**2)
            loss = balance * self.balance + loss
        losses = torch.stack([balance, z, torch.full_like(z, rows / state.layout.context)])
        counts_E = counts_BE.sum(0)
        if not weights_BSK.requires_grad:
            if not in_backward():
                self._count(counts_E, losses)
            return weights_BSK
        row_scale = 1 / max(rows, 1) if self.row_scale is None else self.row_scale
        # The tensor ranks see the same tokens and their gradients are summed: one of them has the losses.
        loss = loss * (row_scale * float(state.counts_here))
        same_BSK: Tensor = _Inject.apply(weights_BSK, loss, counts_E, losses, self)
        return same_BSK

    def _count(self, counts_E: Tensor, losses: Tensor) -> None:
        counted = torch.cat([counts_E, losses]).double()
        self.sums = counted if self.sums is None else self.sums + counted

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, top_k={self.top_k}, score={self.score}"


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loss: Tensor, counts_E: Tensor, losses: Tensor, router: TopKRouter
    ) -> Tensor:
        ctx.save_for_backward(counts_E, losses)
        ctx.router = router
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        counts_E, losses = ctx.saved_tensors
        # The second of a stage's two backward passes may come here again, on its way to another weight.
        if ctx.router is not None:
            ctx.router._count(counts_E, losses)
        ctx.router = None
        return grads[0], torch.ones((), dtype=losses.dtype, device=losses.device), None, None, None


def _check(experts: int, top_k: int, score: str, groups: int, groups_kept: int) -> None:
    require(score in ("softmax", "sigmoid"), "router", "score", "softmax or sigmoid", repr(score))
    require(1 <= top_k <= experts, "router", "top_k", f"1 to {experts}, the experts", top_k)
    divides = groups >= 1 and experts % groups == 0
    require(divides, "router", "groups", f"a divisor of {experts} experts", groups)
    enough = 1 <= groups_kept <= groups and top_k <= experts // groups * groups_kept
    expected = f"1 to {groups} groups that hold at least top_k={top_k} experts"
    require(enough, "router", "groups_kept", expected, groups_kept)
