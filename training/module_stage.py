"""A user's module as the stages of a pipeline: what travels between stages is found by one trial run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..layers import Stage
from ..parallel_state import BadInput, ParallelState
from .pipeline import Pipeline, Travels, make_schedule
from .stage_driver import StageModule

#: Of one micro-batch: the shape and dtype of each tensor that a stage gives.
Given = tuple[Travels, ...]


class ModuleStages:
    """This rank's stages, one or ``parts_of`` the model. Several tensors travel as one, a row a sample.

    ``told``: of a micro-batch of ``samples`` what ``forward`` names, for the trial run. Collective over all
    ranks.
    """

    def __init__(
        self, model: nn.Module, state: ParallelState, told: Mapping[str, Tensor], *, samples: int
    ) -> None:
        self.model, self.state, self.samples = model, state, samples
        self.parts = dict(zip(state.layout.stages_of(state.at.pipeline), parts_of(model, state), strict=True))
        #: What each stage of the model gives, in its order.
        self.gives: list[Given] = []
        group = state.pipeline_group
        for number in range(state.layout.stages):
            holder = state.layout.rank_of_stage(number)
            here: list[Any] = [self._try(number, told) if holder == state.at.pipeline else None]
            dist.broadcast_object_list(here, src=dist.get_global_rank(group, holder), group=group)
            self.gives += here

    def schedule(self, loss: Callable[[Tensor, Tensor], Tensor], *, name: str, microbatches: int) -> Pipeline:
        """``Pipeline.step`` takes the samples' numbers, and by name what the trial run was told."""
        return make_schedule(
            [self._seat(number) for number in self.parts], loss, name=name, microbatches=microbatches,
            entry=Travels((self.samples,), torch.int64), travels=[_packed(one) for one in self.gives],
            state=self.state,
        )  # fmt: skip

    def _seat(self, number: int) -> StageModule:
        """A stage by itself. Which parameters it uses only its code knows: taken are those of all."""
        model, received = self.model, self._received(number)
        last = number == self.state.layout.stages - 1

        def forward(x: Tensor, /, **told: Tensor) -> Tensor:  # a tensor of the samples may be called x too
            given = self._run(number, _unpack(x, received) if received else (), told)
            return given if last else _pack(_tensors(given))

        return StageModule(forward, [model], model if isinstance(model, FSDPModule) else None)

    def _received(self, number: int) -> Given:
        return self.gives[number - 1] if number else ()

    def _run(self, number: int, received: tuple[Tensor, ...], told: Mapping[str, Tensor]) -> Any:
        which = {} if self.parts[number] is None else {"stage": self.parts[number]}
        return self.model(*received, **told, **which)

    def _try(self, number: int, told: Mapping[str, Tensor]) -> Given:
        """What the stage gives for zeros; nothing that is drawn or learnt comes of it."""
        device = self.state.device
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            zeros = [torch.zeros(one.shape, dtype=one.dtype, device=device) for one in self._received(number)]
            given = _tensors(self._run(number, tuple(zeros), told))
        for one in given if number < self.state.layout.stages - 1 else ():
            if len(one) != self.samples or one.dtype != given[0].dtype:
                raise BadInput(
                    "stage", "output", expected=f"tensors of one dtype, {self.samples} samples on dim 0",
                    found=f"{one.dtype} {tuple(one.shape)}",
                )  # fmt: skip
        return tuple(Travels(tuple(one.shape), one.dtype) for one in given)


def parts_of(model: nn.Module, state: ParallelState) -> tuple[Stage | None, ...]:
    """The stages of this rank, which ``forward`` is told by ``stage=``; ``None`` is its one stage, untold.

    ``BadInput`` where the layout has several stages a rank and the model does not say which, or takes none.
    """
    count = state.layout.virtual_stages
    if count == 1:
        return (None,)
    todo = "Keep self.stage = Stage.of(blocks, state=state), or take virtual_stages=1 with 1f1b or gpipe"
    stage = getattr(model, "stage", None)
    if not isinstance(stage, Stage):
        raise BadInput(
            "step", "model.stage", expected=f"a Stage of virtual_stages={count} parts",
            found="none" if stage is None else type(stage).__name__, todo=todo,
        )  # fmt: skip
    numbers, held = state.layout.stages_of(state.at.pipeline), tuple(part.number for part in stage.parts)
    if held != numbers:
        raise BadInput("step", "model.stage", expected=f"parts {numbers}", found=held, todo=todo)
    if "stage" not in inspect.signature(model.forward).parameters:
        todo = "Take stage=None, and where it is given run that one of self.stage.parts alone"
        expected = f"a keyword stage, with virtual_stages={count}"
        raise BadInput("step", "model.forward", expected=expected, found="none", todo=todo)
    return stage.parts


def _tensors(given: Any) -> tuple[Tensor, ...]:
    found = given if isinstance(given, tuple) else (given,)
    if not found or not all(isinstance(one, Tensor) for one in found):
        raise BadInput("stage", "output", expected="a tensor or a tuple of them", found=type(given).__name__)
    return found


def _packed(given: Given) -> Travels:
    if len(given) == 1:
        return given[0]
    return Travels((given[0].shape[0], sum(prod(one.shape[1:]) for one in given)), given[0].dtype)


def _pack(given: tuple[Tensor, ...]) -> Tensor:
    return given[0] if len(given) == 1 else torch.cat([one.flatten(1) for one in given], dim=1)


def _unpack(x: Tensor, given: Given) -> tuple[Tensor, ...]:
    if len(given) == 1:
        return (x,)
    pieces = x.split([prod(one.shape[1:]) for one in given], dim=1)
    return tuple(piece.view(len(x), *one.shape[1:]) for piece, one in zip(pieces, given, strict=True))
