"""One step's forward and backward of any module, in any layout: gradients of one mean, ready to clip."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..layers import routers
from ..parallel_state import (
    BadInput,
    ParallelState,
    divide_gradients,
    finalize_gradients,
    refuse_foreign,
    refuse_untrained,
    signs_of_training,
)
from ..parallel_state.engine import fsdp_modules
from ..pipeline import check_schedule, schedule_kind
from ..pipeline.runner import Pipeline
from ..pipeline.user_stages import ModuleStages, parts_of
from .data_parallel import before_backward
from .evaluation import evaluating
from .loss_contract import is_mean, refuse_mean, sum_and_count

#: Tensors by name, each with the samples on dim 0.
Samples = Mapping[str, Tensor]
#: From what the model gives, and the samples, to the *sum* of the losses and how many they are. What names
#: ``state`` is given it as a keyword too.
SumAndCount = Callable[..., tuple[Tensor, Tensor | int]]


class ModuleStep:
    """``step(samples)`` leaves in ``.grad`` the gradients of the mean loss over the whole step.

    ``loss`` gives a sum and a count for each micro-batch, alike on the ranks of a tensor group. All sums are
    divided by all counts, of every micro-batch and data rank, so that the mean is the same number in every
    layout. The model is called with those tensors of the micro-batch that its ``forward`` names;
    ``micro_batch`` is in samples. With more than one data rank it has been through ``shard_over_data``.

    In a pipeline each rank's model is its stage (see ``Stage.of``), and ``schedule`` one of
    ``SCHEDULE_NAMES``. A stage's ``forward`` is given, before the samples' tensors by name, what the stage
    before gave: one tensor, or several of one dtype, samples on dim 0. The last one gives what ``loss``
    takes: a tensor, or a tuple or dict of such tensors. Where the layout has several stages a rank
    (``virtual_stages``), the model keeps them as ``self.stage = Stage.of(...)``, and ``forward`` is told by
    ``stage=`` which of its ``parts`` to run.

    A trained parameter that no micro-batch gave a gradient, and gradients that are all zero where the loss is
    not, are refused with ``NotTrained``, on every rank alike. ``unused``: a pattern over the names of
    parameters that a step may leave out.
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
        self.model, self.micro_batch, self.unused = model, micro_batch, unused
        self.state = state or ParallelState.alone()
        wants = "state" in inspect.signature(loss).parameters
        self.loss: SumAndCount = partial(loss, state=state) if wants else loss
        self._names, self._schedule_name = named_by(model), schedule
        self._schedule: Pipeline | None = None
        self._shapes: dict[str, torch.Size] = {}
        self._samples: Samples = {}
        self._sums: list[tuple[Tensor, Tensor | int]] = []
        #: Whether the loss was found to be a mean; ``None`` as long as no step could tell.
        self._mean: bool | None = None
        layout = self.state.layout
        if layout.world > 1:
            refuse_foreign(model, "step")
        if layout.context > 1:
            raise BadInput(
                "layout", "context", expected="1 for a module of your own", found=layout.context,
                todo="Its attention would have to fetch keys and values of other ranks",
            )  # fmt: skip
        for name, router in routers(model):
            if router.balance or router.z_loss:
                raise BadInput(
                    "step", f"{name}.balance", expected="0: how many losses the step has is known at its end",
                    found=router.balance or router.z_loss,
                    todo="Use bias_corrected routers and Balancing, or a step of your own",
                )  # fmt: skip
        check_schedule(schedule, layout, schedule_kind(schedule).least_micro_batches(layout.pipeline))
        parts_of(model, self.state)
        if layout.data > 1 and not isinstance(model, FSDPModule):
            todo = "Call shard_over_data(model, state, Precision(...)) before"
            raise BadInput(
                "step", "model", expected=f"one shared over data={layout.data} ranks", found="none", todo=todo
            )

    def __call__(self, samples: Samples) -> Tensor:
        """``samples``: those of this data rank (``own_samples``). Returns the mean, alike on every rank."""
        self._agree(samples)
        parts = [*cut_samples(samples, self.micro_batch)]
        pipelined = self.state.layout.pipeline > 1
        sums = self._pipelined(samples, parts) if pipelined else self._plain(parts)
        signs_here = signs_of_training(self.model, unused=self.unused)
        total, count, signs = self._over_all_ranks(sums, signs_here)
        mean = total / count
        refuse_untrained(self.model, float(mean), signs, unused=self.unused, state=self.state)
        finalize_gradients(self.model, state=self.state)
        divide_gradients(self.model, count)
        return mean

    def _agree(self, samples: Samples) -> None:
        """Refuse, on every rank alike, data ranks with different numbers of samples: each gathers weights
        and sums gradients as often as its neighbours. Where the shapes of one rank's samples changed, all
        ranks set up their pipeline anew: its trial run gathers weights too.
        """
        count = count_samples(samples)
        shapes = {name: one.shape for name, one in samples.items()}
        changed, self._shapes = shapes != self._shapes, shapes
        if self.state.layout.world > 1:
            said = torch.tensor([changed, count, -count])
            dist.all_reduce(said, op=dist.ReduceOp.MAX)
            changed, most, least = bool(said[0]), int(said[1]), -int(said[2])
            if most != least:
                raise BadInput(
                    "batch", "samples", expected="as many on each data rank", found=f"from {least} to {most}",
                    todo="own_samples cuts a whole batch into equal pieces",
                )  # fmt: skip
        if changed:
            self._schedule = None

    @torch.no_grad()
    def evaluate(self, samples: Samples) -> Tensor:
        """Return the mean loss over the samples of all data ranks, alike on every rank; nothing is changed.

        ``samples``: those of this data rank, as a step takes them. The model is in evaluation mode meanwhile.
        Collective over all ranks, which must have equally many samples of the same shapes.
        """
        parts, sums = [*cut_samples(samples, self.micro_batch)], []
        with evaluating(self.model):
            # The stages are tried anew: what travelled in training may have had another shape.
            stages = self._stages(parts[0]) if self.state.layout.pipeline > 1 else None
            for part in parts:
                told = {name: part[name] for name in part if self._names(name)}
                given = self.model(**told) if stages is None else stages.forward_only(told)
                if stages is None or self._has_last_stage:
                    total, count = sum_and_count(self.loss(given, part))
                    sums.append((total, count))
        for module in fsdp_modules(self.model):  # no backward comes that would drop the gathered weights
            module.reshard()
        total, count, _ = self._over_all_ranks(sums)
        return total / count

    def _stages(self, part: Samples) -> ModuleStages:
        told = {name: one for name, one in part.items() if self._names(name)}
        return ModuleStages(self.model, self.state, told, samples=self.micro_batch)

    @property
    def _has_last_stage(self) -> bool:
        return self.state.layout.stages - 1 in self.state.layout.stages_of(self.state.at.pipeline)

    def _plain(self, parts: list[Samples]) -> list[tuple[Tensor, Tensor | int]]:
        sums = []
        for number, part in enumerate(parts):
            if isinstance(self.model, FSDPModule):
                before_backward(self.model, self.state, last=number == len(parts) - 1)
            given = self.model(**{name: part[name] for name in part if self._names(name)})
            total, count = self._loss(given, part)
            total.backward()
            sums.append((total.detach(), count))
        return sums

    def _pipelined(self, samples: Samples, parts: list[Samples]) -> list[tuple[Tensor, Tensor | int]]:
        """The schedule cuts numbers of samples; the loss finds the samples by them."""
        told: dict[str, Any] = {name: one for name, one in samples.items() if self._names(name)}
        if self._schedule is None:
            stages = self._stages(parts[0])
            name, count = self._schedule_name, len(parts)
            self._schedule = stages.schedule(self._loss_of, name=name, microbatches=count)
        state = self.state
        numbers = torch.arange(count_samples(samples), device=state.device)
        first_stage, last_stage = 0 in state.layout.stages_of(state.at.pipeline), self._has_last_stage
        self._samples, self._sums = samples, []
        self._schedule.step(*(numbers,) * first_stage, target=numbers if last_stage else None, **told)
        return self._sums

    def _loss(self, given: Any, part: Samples) -> tuple[Tensor, Tensor | int]:
        found = sum_and_count(self.loss(given, part))
        if self._mean is None:
            self._mean = is_mean(self.loss, given, part)
        return found

    def _loss_of(self, given: Any, numbers: Tensor) -> Tensor:
        total, count = self._loss(given, {name: one[numbers] for name, one in self._samples.items()})
        self._sums.append((total.detach(), count))
        return total

    def _over_all_ranks(
        self, sums: list[tuple[Tensor, Tensor | int]], *more: Tensor
    ) -> tuple[Tensor, Tensor, list[float]]:
        """Add up the losses, their counts, and ``more`` in fp64, where a count is exact. Refuses a loss that
        any rank found to be a mean.
        """
        state = self.state
        totals = [[float(total), float(count)] for total, count in sums] or [[0.0, 0.0]]
        sums_here = torch.tensor(totals, dtype=torch.float64).sum(0).tolist()
        both = torch.tensor([*sums_here, float(self._mean is True)], dtype=torch.float64, device=state.device)
        both = both * int(state.at.tensor == 0)  # its neighbours on the tensor axis have the same
        both = torch.cat([both, *(one.to(both) for one in more)])
        if state.layout.world > 1:
            dist.all_reduce(both)
        if bool(both[2]):
            refuse_mean()
        return both[0], torch.where(both[1] == 0, 1.0, both[1]), both[3:].tolist()


def own_samples(samples: Samples, state: ParallelState | None = None) -> Samples:
    """Of a whole batch, the equal piece of this data rank. ``BadInput`` where it cannot be cut evenly."""
    state = state or ParallelState.alone()
    found, data = count_samples(samples), state.layout.data
    if found % data:
        raise BadInput("batch", "samples", expected=f"a multiple of data={data}", found=found)
    each = found // data
    return {
        name: one[state.data_index * each : (state.data_index + 1) * each] for name, one in samples.items()
    }


def cut_samples(samples: Samples, micro_batch: int) -> Iterable[Samples]:
    """Micro-batches, in order. ``BadInput`` where ``micro_batch`` does not divide the samples."""
    found = count_samples(samples)
    if found % micro_batch:
        expected = f"a divisor of the {found} samples of a data rank"
        raise BadInput("step", "micro_batch", expected=expected, found=micro_batch)
    for start in range(0, found, micro_batch):
        yield {name: one[start : start + micro_batch] for name, one in samples.items()}


def count_samples(samples: Samples) -> int:
    """How many there are; ``BadInput`` where tensors disagree or there are none."""
    for name, one in samples.items():
        if not isinstance(one, Tensor) or not one.ndim:
            found = f"{type(one).__name__}" if not isinstance(one, Tensor) else "a tensor without dims"
            raise BadInput(
                "batch", name, expected="a tensor with the samples on dim 0", found=found,
                todo="Give it a row a sample; what is alike for all samples belongs to the model or the loss",
            )  # fmt: skip
    counts = {name: len(one) for name, one in samples.items()}
    if len(set(counts.values())) != 1:
        raise BadInput(
            "batch", expected="tensors with the same number of samples on dim 0", found=counts or "none"
        )
    return next(iter(counts.values()))


def named_by(model: nn.Module) -> Callable[[str], bool]:
    """Whether ``forward`` takes a keyword of this name."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return lambda name: True
    names = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    return names.__contains__
