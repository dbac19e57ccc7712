"""How evenly the routers of a model use their experts: what a step counted, and biases that follow it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...parallel_state import ParallelState, alone_or
from .router import TopKRouter


@dataclass(frozen=True, slots=True)
class Balance:
    """Of one step, over all its tokens: means over the rows and the routers of the balance loss and the
    z-loss, before their factors (evenly used experts have a balance loss of ``top_k``); ``load``: tokens of
    the most used expert of any router, as a multiple of the mean.
    """

    balance: float
    z_loss: float
    load: float


class Balancing:
    """Counts of all routers of a model, summed over all ranks that see tokens; made once, by every rank.

    ``after_step()``, once after each step's backward passes, gives its ``Balance`` and moves the biases of
    routers that are ``bias_corrected``: by ``rate`` up where an expert had fewer tokens than the mean, down
    where it had more. They are the model's own, alike on all ranks: nothing is to be saved beside it. Source:
    Wang et al. 2024 (auxiliary-loss-free balancing).
    """

    def __init__(self, model: nn.Module, *, rate: float = 0.0, state: ParallelState | None = None) -> None:
        self.state, self.rate = alone_or(state), rate
        self._here = dict(routers(model))
        mine = {name: one.num_experts for name, one in self._here.items()}
        everywhere: list[dict[str, int]] = [mine] * self.state.layout.world
        if self.state.layout.world > 1:
            dist.all_gather_object(everywhere, mine)
        found = {name: size for one in everywhere for name, size in one.items()}
        self._experts = {name: found[name] for name in sorted(found)}

    def after_step(self, *, updated: bool = True) -> Balance | None:
        """Collective over all ranks; ``None`` without routers, or where no token went backward.

        Not ``updated``: the step was skipped, and the biases stay.
        """
        if not self._experts:
            return None
        sums = self._summed()
        loads, balance, z_loss, rows = [], 0.0, 0.0, 0.0
        for name, one in sums.items():
            counts = one[:-3]
            balance, z_loss, rows = balance + float(one[-3]), z_loss + float(one[-2]), rows + float(one[-1])
            if float(counts.sum()):
                loads.append(float(counts.max() / counts.mean()))
                if updated and self.rate and name in self._here:
                    _move(self._here[name], self.rate * (counts.mean() - counts).sign())
        return Balance(balance / rows, z_loss / rows, max(loads)) if loads else None

    def _summed(self) -> dict[str, Tensor]:
        """Every router's tally, (E + 3,) float64 on the host; tallies are empty afterwards."""
        sizes = [size + 3 for size in self._experts.values()]
        parts = []
        for name, size in zip(self._experts, sizes, strict=True):
            tally = self._here[name].tally if name in self._here else None
            # The ranks of a tensor group saw the same tokens.
            counted = tally is not None and tally.sums is not None and self.state.counts_here
            part = torch.zeros(size, dtype=torch.float64, device=self.state.device)
            parts.append(part if not counted or tally is None or tally.sums is None else tally.sums)
            if tally is not None:
                tally.clear()
        flat = torch.cat([part.to(self.state.device) for part in parts])
        if self.state.layout.world > 1:
            dist.all_reduce(flat)
        return dict(zip(self._experts, flat.cpu().split(sizes), strict=True))


def routers(model: nn.Module) -> Iterator[tuple[str, TopKRouter]]:
    """Every router of a model, with its name."""
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter):
            yield name, module


def set_auxiliary_scale(model: nn.Module, scale: float | None) -> None:
    """What each row's balance loss and z-loss count in the backward passes to come.

    A step of several micro-batches or data ranks sets 1 / its rows, over all ranks, times what its loss is
    multiplied with; gradients are then those of the mean over all rows in every layout. ``None``, as at
    first: a call's rows are all there are.
    """
    for _, router in routers(model):
        router.row_scale = scale


def set_auxiliary_losses(
    model: nn.Module, *, balance: float | None = None, z_loss: float | None = None
) -> None:
    """The factors of the losses of every router; ``None`` leaves them."""
    for _, router in routers(model):
        router.balance = router.balance if balance is None else balance
        router.z_loss = router.z_loss if z_loss is None else z_loss


def _move(router: TopKRouter, by: Tensor) -> None:
    if router.bias is not None:
        router.bias.data.add_(by.to(router.bias.device, router.bias.dtype))
