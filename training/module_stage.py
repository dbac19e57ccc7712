"""A user's module as a stage of a pipeline: what travels between stages is found by one trial run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..parallel_state import BadInput, ParallelState
from .pipeline import Pipeline, Travels, make_schedule
from .stage_driver import StageModule

#: Of one micro-batch: the shape and dtype of each tensor that a stage gives.
Given = tuple[Travels, ...]


class ModuleStage:
    """This rank's stage. Several tensors travel as one, a row a sample.

    ``told``: of a micro-batch of ``samples`` what ``forward`` names, for the trial run. Collective over all
    ranks.
    """

    def __init__(
        self, model: nn.Module, state: ParallelState, told: Mapping[str, Tensor], *, samples: int
    ) -> None:
        self.model, self.state, self.samples = model, state, samples
        self.received: Given = ()
        self.gives: Given = ()
        for stage in range(state.layout.pipeline):
            here: list[Any] = [None]
            if stage == state.at.pipeline:
                self.gives = self._try(told)
                here = [self.gives]
            group = state.pipeline_group
            dist.broadcast_object_list(here, src=dist.get_global_rank(group, stage), group=group)
            if stage == state.at.pipeline - 1:
                self.received = here[0]

    def schedule(self, loss: Callable[[Tensor, Tensor], Tensor], *, name: str, microbatches: int) -> Pipeline:
        """``Pipeline.step`` takes the samples' numbers, and by name what the trial run was told."""
        seat = StageModule(
            self._forward, [self.model], self.model if isinstance(self.model, FSDPModule) else None
        )
        entry = Travels((self.samples,), torch.int64)
        return make_schedule(
            [seat], loss, name=name, microbatches=microbatches, entry=entry,
            travels=_packed(self.received) if self.received else entry, gives=_packed(self.gives),
            state=self.state,
        )  # fmt: skip

    def _forward(self, x: Tensor, **told: Tensor) -> Tensor:
        given = self.model(*(_unpack(x, self.received) if self.received else ()), **told)
        if self.state.at.pipeline == self.state.layout.pipeline - 1:
            last: Tensor = given
            return last
        return _pack(_tensors(given))

    def _try(self, told: Mapping[str, Tensor]) -> Given:
        """What the stage gives for zeros; nothing that is drawn or learnt comes of it."""
        device = self.state.device
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            zeros = [torch.zeros(one.shape, dtype=one.dtype, device=device) for one in self.received]
            given = _tensors(self.model(*zeros, **told))
        for one in given if self.state.at.pipeline < self.state.layout.pipeline - 1 else ():
            if len(one) != self.samples or one.dtype != given[0].dtype:
                raise BadInput(
                    "stage", "output", expected=f"tensors of one dtype, {self.samples} samples on dim 0",
                    found=f"{one.dtype} {tuple(one.shape)}",
                )  # fmt: skip
        return tuple(Travels(tuple(one.shape), one.dtype) for one in given)


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
