"""Sum what ranks say of a step: its inputs on the host, before the forward, and its losses at the end.

Both sums also refuse, on all ranks alike, what one of them cannot use.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel_state import BadInput, ParallelState, require
from .loss import Fault, Loss, Scales, Sums
from .samples import Samples, count_samples, some_samples

_NO_COUNT = Fault("counts that are finite and not below 0", "others in all")
_APART = Fault(
    "equal sums on the ranks of a tensor group", "others on some of them",
    "Make whole what the loss is given, as gather_from_tensor does, or sum in the loss over the ranks",
)  # fmt: skip


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
    #: The factor of the loss, and its square.
    scale: float = 0
    scale_squared: float = 0

    #: The fields that are summed beside the counts.
    NUMBERS: ClassVar[tuple[str, ...]]

    def agreed(self, state: ParallelState, refusal: BadInput | None = None) -> "StepReport":
        """Return the sums over all ranks, but with this rank's rows; raise on all what one cannot use.

        ``refusal``: why this rank cannot use its samples. Collective.
        """
        total, world = self, state.layout.world
        if world > 1:
            flags = [getattr(self, name) for name in StepReport.NUMBERS]
            # Counts may be weights; whole numbers are exact up to 2^53.
            numbers = torch.tensor([*flags, *self.counts.values()], dtype=torch.float64)
            dist.all_reduce(numbers)
            sums = numbers.tolist()
            total = StepReport(dict(zip(self.counts, sums[len(flags) :], strict=True)), *sums[: len(flags)])
        if refusal is not None:
            raise refusal
        refused = "one that another rank refused"
        require(not total.refused, "batch", None, "one that each rank can use", refused)
        if total.rows**2 != world * total.rows_squared:  # only of equal numbers is it the mean of squares
            raise BadInput(
                "batch", "samples", expected="the same number on each data rank",
                found=_range(self.rows), todo="shard_batch cuts a whole batch into equal pieces",
            )  # fmt: skip
        if not math.isclose(total.scale**2, world * total.scale_squared):
            raise BadInput(
                "step", "scale", expected="the same on each rank", found=_range(self.scale),
                todo="torch's GradScaler decides on each rank alone: take its ShardedGradScaler, or Update",
            )  # fmt: skip
        require(
            not total.stale, "step", "gradients", "none, or zeros, before a step", "those of an earlier step",
            "Call optimizer.zero_grad() after each update (model.zero_grad() also clears what the optimizer "
            "lacks); one call takes all samples of a step",
        )  # fmt: skip
        return replace(total, rows=self.rows)


StepReport.NUMBERS = tuple(field.name for field in fields(StepReport) if field.name != "counts")


def _range(number: float) -> str:
    """Say between which numbers those of all ranks lie. Collective."""
    extremes = torch.tensor([-number, number], dtype=torch.float64)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    return f"from {-extremes[0]:g} to {extremes[1]:g}"


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
    expected = f"a count of each term, {', '.join(names)}"
    require(counts.keys() == {*names}, "step", "loss.count", expected, ", ".join(counts) or "none")
    numbers = {name: float(counts[name]) for name in names}
    for name, number in numbers.items():
        counts_rows = math.isfinite(number) and number >= 0
        require(counts_rows, "step", f"loss.{name}", "a count that is finite and not below 0", number)
    return numbers


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

    def refuse_faults(self, checks: Sequence[float], *, alike: bool = True) -> None:
        """Raise ``BadInput`` for a fault of the loss; ``alike``: see ``Step.refuse``.

        ``checks``: on the host; all ranks call it alike.
        """
        for fault, ranks in zip(self.faults, checks[2:], strict=True):
            if alike or fault is not _APART:
                require(not ranks, "step", "loss", fault.expected, fault.found, fault.todo)


class StepSums:
    """Add up the sums of a loss."""

    def __init__(self, loss: Loss, scales: Scales) -> None:
        self.loss, self.scales = loss, scales
        self._sums: list[Sums] = []
        self._faulty: Sequence[bool] = ()

    def add(self, output: Any, samples: Samples) -> Tensor:
        """Return a micro-batch's part of the step's loss, times the loss scale."""
        sums = self.loss(output, samples, self.scales)
        self._faulty = self.loss.find_faults(output, samples)
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
        columns += [[fault] for fault in self._faulty or [False] * len(loss.faults)]
        columns = columns if state.counts_here else [[]] * len(columns)
        split = [len(columns) - len(loss.faults), len(columns)]
        if state.tensor.size > 1 and loss.count_labels is None:  # a user's: are its sums equal on all?
            factor = state.tensor.size * state.counts_here - 1
            apart = [factor * x.double() for sums in self._sums for x in sums.terms.values()]
            columns += [[*apart], [x.abs() for x in apart]]
        host = [sum(float(x) for x in column if not isinstance(x, Tensor)) for column in columns]
        numbers = torch.tensor([*host, *parameters], dtype=torch.float64).to(device, non_blocking=True)
        for index, column in enumerate(columns):
            if tensors := [x.to(device) for x in column if isinstance(x, Tensor)]:
                numbers[index] += torch.stack(tensors).sum(dtype=torch.float64)
        if state.layout.world > 1:
            dist.all_reduce(numbers)
        sums, faults, apart_by, trained = numbers.tensor_split([*split, len(columns)])
        checks, faults_known, divisor = torch.cat([trained, faults]), loss.faults, None
        if loss.count is None:
            count = sums[-1]
            bad = ~count.isfinite() | (count < 0)
            divisor = torch.where(count == 0, 1.0, torch.where(bad, torch.nan, count))
            checks, faults_known = torch.cat([checks, bad.double().view(1)]), (*faults_known, _NO_COUNT)
        if len(apart_by):
            differ = apart_by[:1].abs() > 1e-4 * apart_by[1:]
            checks, faults_known = torch.cat([checks, differ.double()]), (*faults_known, _APART)
        means = sums[: len(names)] / (scale if divisor is None else scale * divisor)
        terms = dict(zip(names, means.unbind(), strict=True))
        first, *others = (terms[name] for name in names if loss.terms[name].in_total)
        return StepResult(sum(others, first), checks, terms, faults_known, unused), divisor
