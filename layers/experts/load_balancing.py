"""Measure how evenly routers use their experts, and move the biases that even it out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...parallel_state import ParallelState, alone_or
from .router import TopKRouter


@dataclass(frozen=True, slots=True)
class Balance:
    """Report the balance of all routers in one step.

    ``balance`` and ``z_loss`` are means of the losses over rows and routers, before their factors; experts
    that are used evenly have a balance loss of ``top_k``. ``balance`` is ``None`` if a router computes no
    such loss, see ``TopKRouter``. ``load``: tokens of the busiest expert of any router, over the mean.
    """

    balance: float | None
    z_loss: float
    load: float


@contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Let routers of ``model`` not count what goes through them inside this context, as in a trace."""
    before = {router: router.sums for _, router in routers(model)}
    for router in before:
        router.sums = None
    try:
        yield
    finally:
        for router, sums in before.items():
            router.sums = sums


class Balancing:
    """Count the tokens of all experts over all ranks, and move the routers' biases towards even loads.

    Every rank makes one. Call ``after_step()`` once after the backward passes of each step: it returns the
    step's ``Balance`` and moves the biases of ``bias_corrected`` routers by ``rate``, up if the expert had
    fewer tokens than the mean and down if it had more; those of a frozen router stay. The biases are part of
    the model and equal on all ranks, so nothing else has to be saved. Source: Wang et al. 2024
    (auxiliary-loss-free balancing).
    """

    def __init__(self, model: nn.Module, *, rate: float = 0.0, state: ParallelState | None = None) -> None:
        self.state, self.rate = alone_or(state), rate
        self._here = dict(routers(model))
        counts = {name: router.num_experts for name, router in self._here.items()}
        everywhere: list[dict[str, int]] = [counts] * self.state.layout.world
        if self.state.layout.world > 1:
            dist.all_gather_object(everywhere, counts)
        sizes = {name: size for rank_sizes in everywhere for name, size in rank_sizes.items()}
        self._experts = {name: sizes[name] for name in sorted(sizes)}

    def after_step(self, *, updated: bool = True, sums: Tensor | None = None) -> Balance | None:
        """Return the balance of the step and move the biases. Collective over all ranks.

        Returns ``None`` without routers, or if none has counted a token. Pass ``updated=False``
        for a skipped step: the biases then stay. ``sums``: what ``summed`` returned, where it was read back
        to the host with other numbers; without it the host waits for the device here.
        """
        flat = self.summed().cpu() if sums is None else sums
        sizes = [size + 3 for size in self._experts.values()]
        by_name = dict(zip(self._experts, flat.split(sizes), strict=True))
        biases = {
            name: router.bias
            for name, router in self._here.items()
            if any(parameter.requires_grad for parameter in router.parameters())
        }
        for router in self._here.values():
            router.sums = None
        loads, losses = [], torch.zeros(3, dtype=torch.float64)
        for name, totals in by_name.items():
            counts = totals[:-3]
            losses += totals[-3:]
            if float(counts.sum()):
                loads.append(float(counts.max() / counts.mean()))
                if updated and self.rate and (bias := biases.get(name)) is not None:
                    move = self.rate * (counts.mean() - counts).sign()
                    bias.data.add_(move.to(bias.device, bias.dtype, non_blocking=True))
        if not loads:
            return None
        balance, z_loss, rows = losses.tolist()
        return Balance(None if isnan(balance) else balance / rows, z_loss / rows, max(loads))

    def summed(self) -> Tensor:
        """Return every router's ``sums`` over all ranks, one after the other, on the model's device.

        Collective over all ranks; does not wait for the device.
        """
        if not self._experts:
            return torch.zeros(0, dtype=torch.float64)
        # The ranks of a tensor group saw the same tokens.
        routers = self._here.items() if self.state.counts_here else ()
        counted = {name: router.sums for name, router in routers if router.sums is not None}
        alone, device = self.state.layout.world == 1, self.state.device
        if alone and counted:  # made without a state, it is not told where the model is
            device = next(iter(counted.values())).device
        zeros = {
            name: torch.zeros(size + 3, dtype=torch.float64, device=device)
            for name, size in self._experts.items()
        }
        flat = torch.cat([sums.to(device) for sums in (zeros | counted).values()])
        if not alone:
            dist.all_reduce(flat)
        return flat


def routers(model: nn.Module) -> Iterator[tuple[str, TopKRouter]]:
    """Return every router of a model with its name."""
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter):
            yield name, module


def set_auxiliary_scale(model: nn.Module, scale: float | None) -> None:
    """Set the weight of each row's balance loss and z-loss for the following backward passes.

    A step of several micro-batches or data ranks sets 1 / (its number of rows over all ranks), times the
    factor of its loss. Gradients are then those of the mean over all rows, in every layout. ``None``, the
    initial value: the rows of one call are all rows.
    """
    for _, router in routers(model):
        router.row_scale = scale


def set_auxiliary_losses(
    model: nn.Module, *, balance: float | None = None, z_loss: float | None = None
) -> None:
    """Set the factors of the losses of every router; ``None`` leaves a factor as it is."""
    for _, router in routers(model):
        router.balance = router.balance if balance is None else balance
        router.z_loss = router.z_loss if z_loss is None else z_loss
