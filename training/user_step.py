"""Run one step's forward and backward of any module, in any layout; gradients of one mean, ready to clip."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..layers import routers
from ..parallel_state import (
    BadInput,
    ParallelState,
    alone_or,
    divide_gradients,
    has_gradients,
)
from ..parallel_state.engine import fsdp_modules
from ..pipeline import Stages, check_schedule, schedule_kind
from .base_step import Step, refuse_stale
from .compute_weights import computing
from .evaluation import evaluating
from .loss_contract import is_mean, refuse_mean, sum_and_count
from .samples import Samples, count_samples, some_samples

#: From what the model gives, and the samples, to the *sum* of the losses and how many they are. What names
#: ``state`` is given it as a keyword too.
SumAndCount = Callable[..., tuple[Tensor, Tensor | int]]


class ModuleStep(Step):
    """Compute the gradients of a step's mean loss for any model: ``step(samples)`` leaves them in ``.grad``.

    ``loss`` returns a sum and a count for each micro-batch, equal on the ranks of a tensor group. All sums
    are divided by all counts, over every micro-batch and data rank, so the mean is the same number in every
    layout. The model is called with the tensors of the micro-batch that its ``forward`` names.
    ``micro_batch``: number of samples. With more than one data rank the model must have been through
    ``shard_over_data``.

    In a pipeline each rank's model is its stage (see ``Stage.of``), and ``schedule`` is one of
    ``SCHEDULE_NAMES``. The ``forward`` of a stage gets the output of the previous stage first, and then the
    samples' tensors by name. That output is one tensor, or several of one dtype, with the samples on dim 0.
    The last stage returns what ``loss`` takes: a tensor, or a tuple or dict of such tensors. If a rank holds
    several stages (``virtual_stages``), the model keeps them as ``self.stage = Stage.of(...)``, and
    ``stage=`` tells ``forward`` which of its ``parts`` to run.

    Raises ``NotTrained``, on every rank alike, if a trained parameter got no gradient from any micro-batch,
    or if all gradients are zero while the loss is not. ``unused``: a pattern over the names of parameters
    that a step may leave out.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: SumAndCount,
        *,
        micro_batch: int,
        schedule: str = "1f1b",
        unused: str | None = None,
        state: ParallelState | None = None,
    ) -> None:
        super().__init__(model, alone_or(state), micro_batch=micro_batch, unused=unused)
        self.model = model
        wants = "state" in inspect.signature(loss).parameters
        self.loss: SumAndCount = partial(loss, state=state) if wants else loss
        self._schedule_name, self._shapes = schedule, dict[str, torch.Size]()
        self._sums: list[tuple[Tensor, Tensor | int]] = []
        #: True if the loss was found to be a mean; ``None`` while no step could tell.
        self._mean: bool | None = None
        layout = self.state.layout
        if layout.context > 1:
            raise BadInput(
                "layout", "context", expected="1 for a module of your own", found=layout.context,
                todo="Its attention would have to fetch keys and values of other ranks",
            )  # fmt: skip
        for name, router in routers(model):
            if router.balance or router.z_loss:
                raise BadInput(
                    "step", f"{name}.balance",
                    expected="0: the number of a step's losses is known only at its end",
                    found=router.balance or router.z_loss,
                    todo="Use bias_corrected routers and Balancing, or a step of your own",
                )  # fmt: skip
        check_schedule(schedule, layout, schedule_kind(schedule).least_micro_batches(layout.pipeline))
        self.stages = Stages(model, self.state)

    def __call__(self, samples: Samples) -> Tensor:
        """Run forward and backward of this data rank's ``samples`` (``shard_batch``).

        Returns the mean, alike on every rank. Gradients that an earlier step left are refused; zeros are not.
        """
        self._agree(samples)
        parts, self._sums = self._cut(samples), []
        with computing(self.model):
            if self.state.layout.pipeline > 1:
                self._pipelined(samples)
            else:
                self.accumulate(parts, self._loss_of)
        total, count, counts = self._totals()
        self.refuse(total / count, counts)
        self.gradients.finalize(reduce=self.reduce)
        divide_gradients(self.model, count)
        return total / count

    def _agree(self, samples: Samples) -> None:
        """Refuse, on every rank alike, data ranks with different numbers of samples.

        Each rank must gather weights and sum gradients as often as its neighbours. If the shapes of one
        rank's samples changed, all ranks set up their pipeline anew: its trial run gathers weights too.
        """
        count = count_samples(samples)
        shapes = {name: one.shape for name, one in samples.items()}
        changed, self._shapes = shapes != self._shapes, shapes
        stale = has_gradients(self.model)
        if self.state.layout.world > 1:
            said = torch.tensor([changed, count, -count, stale])
            dist.all_reduce(said, op=dist.ReduceOp.MAX)
            changed, most, least, stale = bool(said[0]), int(said[1]), -int(said[2]), bool(said[3])
            if most != least:
                raise BadInput(
                    "batch", "samples", expected="the same number on each data rank",
                    found=f"from {least} to {most}",
                    todo="shard_batch cuts a whole batch into equal pieces",
                )  # fmt: skip
        if stale:
            refuse_stale()
        if changed:
            self.stages.fit(some_samples(samples, 0, self.micro_batch))

    @torch.no_grad()
    def evaluate(self, samples: Samples) -> Tensor:
        """Return the mean loss over the samples of all data ranks, equal on every rank; nothing is changed.

        ``samples``: those of this data rank, as a step takes them. The model is in evaluation mode meanwhile.
        Collective over all ranks, which must have the same number of samples of the same shapes.
        """
        parts, self._sums = self._cut(samples), []
        with evaluating(self.model), computing(self.model):
            stages = Stages(self.model, self.state)  # other shapes may travel than in training
            stages.fit(parts[0])
            for part in parts:
                output = stages.forward(part)
                if stages.has_last:
                    self._loss(output, part)
        for module in fsdp_modules(self.model):  # no backward comes that would drop the gathered weights
            module.reshard()
        total, count, _ = self._totals()
        return total / count

    def _cut(self, samples: Samples) -> list[Samples]:
        """Return the micro-batches, in order."""
        count = count_samples(samples)
        self.check_samples(count)
        return [some_samples(samples, start, self.micro_batch) for start in range(0, count, self.micro_batch)]

    def _loss_of(self, part: Samples) -> Tensor:
        return self._loss(self.stages.forward(part), part)

    def _pipelined(self, samples: Samples) -> None:
        def loss_of(output: Any, start: int) -> Tensor:
            return self._loss(output, some_samples(samples, start, self.micro_batch))

        self.stages.train(samples, loss_of, schedule=self._schedule_name, micro_batch=self.micro_batch)

    def _loss(self, output: Any, part: Samples) -> Tensor:
        """Return the sum of a micro-batch's losses, and note it, with its count, for the end of the step."""
        total, count = sum_and_count(self.loss(output, part))
        if self._mean is None:
            self._mean = is_mean(self.loss, output, part)
        self._sums.append((total.detach(), count))
        return total

    def _totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of all ranks' losses and their count, in fp64, where a count is exact, and the
        counts for ``refuse``. Refuses a loss that any rank found to be a mean.
        """
        each = [[float(total), float(count)] for total, count in self._sums] or [[0.0, 0.0]]
        numbers = [*torch.tensor(each, dtype=torch.float64).sum(0).tolist(), float(self._mean is True)]
        device = self.state.device
        sums, counts = self.sum_over_ranks(torch.tensor(numbers, dtype=torch.float64, device=device))
        total, count, means = sums
        if bool(means):
            refuse_mean()
        if not math.isfinite(counted := float(count)) or counted < 0:
            found = f"{counted:g} in all"
            raise BadInput("step", "loss", expected="counts that are finite and not below 0", found=found)
        return total, torch.where(count == 0, 1.0, count), counts
