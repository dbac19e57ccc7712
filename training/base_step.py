"""Define what every training step shares: the loop over micro-batches, sums over all ranks, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..parallel_state import (
    BadInput,
    GradientSums,
    ParallelState,
    check_state,
    refuse_foreign,
    refuse_untrained,
)
from ..parallel_state.engine import is_sharded
from .zero_on_fsdp import before_backward

MicroBatch = TypeVar("MicroBatch")


class Step:
    """Share the body of ``TrainStep`` and ``ModuleStep``, which differ in their micro-batches and losses.

    ``micro_batch`` is in samples. ``unused``: a pattern over the names of parameters that a step may leave
    without a gradient. ``reduce``: data type of the sums of gradients outside FSDP; default: that of the
    gradients. Raises ``BadInput`` for several data ranks and a model that is not shared over them, or that
    one of torch's own wrappers shares.
    """

    #: Whether every micro-batch gives every trained parameter a gradient. If so, the replicas of a shard sum
    #: their gradients at the last one alone, where FSDP sums nothing for a group that got no gradient.
    trains_all = False

    def __init__(
        self,
        model: nn.Module,
        state: ParallelState,
        *,
        micro_batch: int,
        unused: str | None = None,
        reduce: torch.dtype | None = None,
    ) -> None:
        if type(micro_batch) is not int or micro_batch < 1:
            expected = "a whole number of 1 or more"
            raise BadInput("step", "micro_batch", expected=expected, found=repr(micro_batch))
        try:
            re.compile(unused or "")
        except re.error as error:
            expected, found = "a pattern over names of parameters", f"{unused!r}: {error}"
            raise BadInput("step", "unused", expected=expected, found=found) from None
        self._whole, self.state, self.micro_batch = model, state, micro_batch
        self.unused, self.reduce = unused, reduce
        self._gradients: GradientSums | None = None
        check_state(model, state, "step")
        if dist.is_initialized() and dist.get_world_size() > state.layout.world:
            refuse_foreign(model, "step")  # a state of one rank, and a wrapper that averages over several
        data = state.layout.data
        if data > 1 and not is_sharded(model):
            todo = "Call shard_over_data(model, state, Precision(...)) before"
            expected = f"one shared over data={data} ranks"
            raise BadInput("step", "model", expected=expected, found="none", todo=todo)

    def check_samples(self, samples: int) -> None:
        """Raise ``BadInput`` if ``micro_batch`` does not divide the number of samples of this data rank."""
        if samples % self.micro_batch:
            expected = f"a divisor of the {samples} samples of a data rank"
            raise BadInput("step", "micro_batch", expected=expected, found=self.micro_batch)

    def accumulate(
        self, parts: Sequence[MicroBatch], loss_of: Callable[[MicroBatch], Tensor]
    ) -> list[Tensor]:
        """Run forward and backward of the micro-batches, and return their losses; for one pipeline stage."""
        losses, sharded = [], is_sharded(self._whole)
        for number, part in enumerate(parts):
            if sharded:
                last = number == len(parts) - 1
                before_backward(self._whole, self.state, last=last, sum_replicas=last or not self.trains_all)
            loss = loss_of(part)
            loss.backward()
            losses.append(loss.detach())
        return losses

    @property
    def gradients(self) -> GradientSums:
        """Return the gradients of the model, looked up at the first call."""
        if self._gradients is None:
            self._gradients = GradientSums(self._whole, self.state, where="step")
        return self._gradients

    def sum_over_ranks(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Sum ``numbers`` over all ranks, counting each tensor group once; call it after the last backward.

        Returns the sums and the two counts for ``refuse``, which are summed in the same collective. Does not
        wait for the device.
        """
        unused = re.compile(self.unused or "(?!)")  # by default a pattern that nothing matches
        counts = torch.tensor(self.gradients.count(unused=unused.search), dtype=numbers.dtype)
        counts = counts.to(numbers.device, non_blocking=True)
        sums = torch.cat([numbers * int(self.state.counts_here), counts])
        if self.state.layout.world > 1:
            dist.all_reduce(sums)
        return sums[:-2], sums[-2:]

    def refuse(self, mean: Tensor, counts: Tensor) -> None:
        """Refuse a step that leaves a parameter untrained, on every rank alike, before the update. Waits for
        the device. ``mean``: the loss of the whole step.
        """
        refuse_untrained(self._whole, float(mean), counts.tolist(), unused=self.unused, state=self.state)


def refuse_stale() -> None:
    """Refuse gradients that an earlier step left (``has_gradients``), on every rank alike."""
    raise BadInput(
        "step", "gradients", expected="none, or zeros, before a step", found="those of an earlier step",
        todo="Call optimizer.zero_grad() after each update; one call takes all samples of a step",
    )  # fmt: skip
