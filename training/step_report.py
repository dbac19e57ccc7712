"""Let all ranks agree on a step before its forward: one sum of named numbers, on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel_state import BadInput, ParallelState
from .loss import Loss, Scales
from .samples import Samples, count_samples, some_samples


@dataclass(frozen=True, slots=True)
class StepReport:
    """Hold what a rank says before a step, or the sums of what all of them say."""

    #: By what each term of the loss is divided.
    counts: Mapping[str, float]
    #: The number of samples of a data rank, and its square.
    rows: float = 0
    rows_squared: float = 0
    #: Whether a rank cannot use its samples, still has gradients, and has samples of another shape than in
    #: the step before; of all ranks how many.
    refused: float = 0
    stale: float = 0
    reshaped: float = 0

    def agreed(self, state: ParallelState, refusal: BadInput | None = None) -> StepReport:
        """Return the sums over all ranks, but with this rank's rows; raise on all what one cannot use.

        ``refusal``: why this rank cannot use its samples. Collective.
        """
        total, world = self, state.layout.world
        if world > 1:
            flags = (self.rows, self.rows_squared, self.refused, self.stale, self.reshaped)
            # Counts may be weights; whole numbers are exact up to 2^53.
            numbers = torch.tensor([*flags, *self.counts.values()], dtype=torch.float64)
            dist.all_reduce(numbers)
            sums = numbers.tolist()
            total = StepReport(dict(zip(self.counts, sums[len(flags) :], strict=True)), *sums[: len(flags)])
        if refusal is not None:
            raise refusal
        if total.refused:
            raise BadInput(
                "batch", expected="one that each rank can use", found="one that another rank refused"
            )
        if total.rows**2 != world * total.rows_squared:  # only of equal numbers is it the mean of squares
            extremes = torch.tensor([self.rows, -self.rows])
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
            most, least = int(extremes[0]), -int(extremes[1])
            raise BadInput(
                "batch", "samples", expected="the same number on each data rank",
                found=f"from {least} to {most}", todo="shard_batch cuts a whole batch into equal pieces",
            )  # fmt: skip
        if total.stale:
            raise BadInput(
                "step", "gradients", expected="none, or zeros, before a step",
                found="those of an earlier step",
                todo="Call optimizer.zero_grad() after each update; one call takes all samples of a step",
            )  # fmt: skip
        return replace(total, rows=self.rows)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Hold what a step knows before its forward."""

    #: This rank's samples, cut over the context ranks, on the device.
    samples: Samples
    #: The samples of the step, over all data ranks.
    rows: int
    #: For each term of the loss: the loss scale times the term's weight, over its count if that is known.
    scales: Scales
    #: Whether samples of any rank have other shapes than in the step before.
    reshaped: bool
    #: In place of samples: micro-batches that are made as they are asked for, once.
    parts: Iterator[Samples] | None = None

    def micro_batches(self, size: int) -> Iterator[Samples]:
        if self.parts is not None:
            yield from self.parts
            return
        for start in range(0, count_samples(self.samples), size):
            yield some_samples(self.samples, start, size)


def checked_counts(loss: Loss, counts: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return the counts of the loss's terms, in their order, on the host; ``BadInput`` for what is none."""
    names = [*loss.terms]
    if counts.keys() != loss.terms.keys():
        expected, found = f"a count of each term, {', '.join(names)}", ", ".join(counts) or "none"
        raise BadInput("step", "loss.count", expected=expected, found=found)
    numbers = {name: float(counts[name]) for name in names}
    for name, number in numbers.items():
        if not math.isfinite(number) or number < 0:
            expected = "a count that is finite and not below 0"
            raise BadInput("step", f"loss.{name}", expected=expected, found=number)
    return numbers
