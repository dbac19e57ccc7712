"""Sum a step's losses over its micro-batches and over all ranks, and refuse what the sums tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel_state import BadInput, ParallelState
from .loss import Fault, Loss, Scales, Sums
from .samples import Samples

_NO_COUNT = Fault("counts that are finite and not below 0", "others in all")


class StepResult(NamedTuple):
    """Hold what a step knows at its end, equal on every rank, on the device; ``Update`` takes it."""

    #: The mean over the step: the sum of those terms that count in the total.
    loss: Tensor
    #: Trained parameters of all ranks; how many of them have no gradient; the ranks that found each fault.
    checks: Tensor
    #: Each term of the loss, times its weight.
    terms: Mapping[str, Tensor]
    #: What ``checks`` counts after the first two.
    faults: tuple[Fault, ...] = ()
    #: The pattern over names of parameters that may have no gradient.
    unused: str | None = None

    def refuse_faults(self, checks: Sequence[float]) -> None:
        """Raise ``BadInput`` for a fault of the loss. ``checks``: on the host; all ranks call it alike."""
        for fault, ranks in zip(self.faults, checks[2:], strict=True):
            if ranks:
                raise BadInput("step", "loss", expected=fault.expected, found=fault.found, todo=fault.todo)


class StepSums:
    """Add up the sums of a loss. ``faulty``: what was found out about the loss, ``None`` if nothing yet."""

    def __init__(self, loss: Loss, scales: Scales, faulty: Sequence[bool] | None = None) -> None:
        self.loss, self.scales, self.faulty = loss, scales, faulty
        self._sums: list[Sums] = []

    def add(self, output: Any, samples: Samples) -> Tensor:
        """Return a micro-batch's part of the step's loss, times the loss scale."""
        sums = self.loss(output, samples, self.scales)
        if self.faulty is None:
            self.faulty = self.loss.find_faults(output, samples)
        self._sums.append(Sums({name: term.detach() for name, term in sums.terms.items()}, sums.count))
        first, *others = sums.terms.values()
        return sum(others, first)

    def total(
        self,
        state: ParallelState,
        device: torch.device,
        *,
        scale: float = 1.0,
        parameters: Sequence[int] = (0, 0),
        unused: str | None = None,
    ) -> tuple[StepResult, Tensor | None]:
        """Sum over all ranks, in fp64 and one collective, without waiting; call it after the last backward.

        ``scale``: of the loss. ``parameters``: how many this rank trains, and how many have no gradient.
        Returns also the count by which gradients are still to be divided, of a loss that counts afterwards.
        """
        loss, names = self.loss, [*self.loss.terms]
        columns: list[list[Tensor | float]] = [[sums.terms[name] for sums in self._sums] for name in names]
        if loss.count is None:
            columns.append([sums.count for sums in self._sums])
        columns += [[fault] for fault in self.faulty or [False] * len(loss.faults)]
        columns = columns if state.counts_here else [[]] * len(columns)
        host = [sum(float(x) for x in column if not isinstance(x, Tensor)) for column in columns]
        numbers = torch.tensor([*host, *parameters], dtype=torch.float64).to(device, non_blocking=True)
        for index, column in enumerate(columns):
            if tensors := [x.to(device) for x in column if isinstance(x, Tensor)]:
                numbers[index] += torch.stack(tensors).sum(dtype=torch.float64)
        if state.layout.world > 1:
            dist.all_reduce(numbers)
        sums, faults, trained = numbers.tensor_split([len(columns) - len(loss.faults), len(columns)])
        checks, known, divisor = torch.cat([trained, faults]), loss.faults, None
        if loss.count is None:
            count = sums[-1]
            bad = ~count.isfinite() | (count < 0)
            divisor = torch.where(count == 0, 1.0, torch.where(bad, torch.nan, count))
            checks, known = torch.cat([checks, bad.double().view(1)]), (*known, _NO_COUNT)
        means = sums[: len(names)] / (scale if divisor is None else scale * divisor)
        terms = dict(zip(names, means.unbind(), strict=True))
        first, *others = (terms[name] for name in names if loss.terms[name].in_total)
        return StepResult(sum(others, first), checks, terms, known, unused), divisor
