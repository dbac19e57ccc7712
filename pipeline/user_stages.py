"""Run a user's module as pipeline stages; one trial run finds the tensors that go between them."""

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
from ..parallel_state import BadInput, ParallelState, PeerFailed
from ..parallel_state.engine import accelerator
from .driver import StageModule
from .relay import exchange
from .runner import Pipeline, Travels, make_schedule

#: The shape and dtype of each tensor that a stage gives for one micro-batch.
Given = tuple[Travels, ...]


class ModuleStages:
    """Hold this rank's stages of a user's model: one, or those of ``parts_of``.

    Several tensors are sent as one, with a row for each sample. ``keywords``: the keyword arguments of
    ``forward`` for a micro-batch of ``samples``, used in the trial run. Collective over all ranks.
    """

    def __init__(
        self, model: nn.Module, state: ParallelState, keywords: Mapping[str, Tensor], *, samples: int
    ) -> None:
        self.model, self.state, self.samples = model, state, samples
        self.parts = dict(zip(state.layout.stages_of(state.at.pipeline), parts_of(model, state), strict=True))
        #: The outputs of each stage of the model, in order.
        self.gives: list[Given] = []
        #: From the tensors that the last stage gives to what the model gave.
        self._whole: Callable[[tuple[Tensor, ...]], Any] = tuple
        self._error: Exception | None = None
        group = state.pipeline_group
        for number in range(state.layout.stages):
            holder = state.layout.rank_of_stage(number)
            here: list[Any] = [self._tried(number, keywords) if holder == state.at.pipeline else None]
            dist.broadcast_object_list(here, src=dist.get_global_rank(group, holder), group=group)
            if isinstance(here[0], Exception):  # on every rank: none waits for a stage that failed
                raise self._error or here[0]
            self.gives += here

    def schedule(self, loss: Callable[[Tensor, Tensor], Tensor], *, name: str, microbatches: int) -> Pipeline:
        """Return a schedule. Its ``step`` takes the samples' numbers, and by name the trial's keywords."""
        return make_schedule(
            [self._seat(number) for number in self.parts],
            lambda given, numbers: loss(self._last(given), numbers), name=name, microbatches=microbatches,
            entry=Travels((self.samples,), torch.int64), travels=[_packed(one) for one in self.gives],
            state=self.state,
        )  # fmt: skip

    def _seat(self, number: int) -> StageModule:
        """Return a stage as a module. It has all parameters: only the model's code knows which it uses."""
        model, received = self.model, self._received(number)

        # A tensor of the samples may be called x too.
        def forward(x: Tensor, /, **keywords: Tensor) -> Tensor:
            return _pack(_tensors(self._run(number, _unpack(x, received) if received else (), keywords)))

        return StageModule(forward, [model], model if isinstance(model, FSDPModule) else None)

    def forward_only(self, keywords: Mapping[str, Tensor]) -> Any:
        """Run one micro-batch through the stages of all ranks; return the model's output on the last stage.

        Collective over the pipeline; no gradients.
        """
        here, holder, group = (
            self.state.at.pipeline,
            self.state.layout.rank_of_stage,
            self.state.pipeline_group,
        )
        out: Any = None
        for number in self.parts:
            received: tuple[Tensor, ...] = ()
            if number:
                x = out
                if (before := holder(number - 1)) != here:
                    packed = _packed(self._received(number))
                    x = torch.empty(packed.shape, dtype=packed.dtype, device=self.state.device)
                    exchange(dist.irecv, x, before, group)
                received = _unpack(x, self._received(number))
            given = self._run(number, received, keywords)
            if number == self.state.layout.stages - 1:
                return given
            out = _pack(_tensors(given))
            if (after := holder(number + 1)) != here:
                exchange(dist.isend, out.contiguous(), after, group)
        return None

    def _last(self, given: Tensor) -> Any:
        """Return the model's output, rebuilt from the tensor that its last stage gave to the schedule."""
        return self._whole(_unpack(given, self.gives[-1]))

    def _tried(self, number: int, keywords: Mapping[str, Tensor]) -> Given | Exception:
        try:
            return self._try(number, keywords)
        except Exception as error:
            self._error = error
            said = f"stage {number} failed in its trial run: {type(error).__name__}: {error}"
            return error if isinstance(error, BadInput) else PeerFailed(said)

    def _received(self, number: int) -> Given:
        return self.gives[number - 1] if number else ()

    def _run(self, number: int, received: tuple[Tensor, ...], keywords: Mapping[str, Tensor]) -> Any:
        which = {} if self.parts[number] is None else {"stage": self.parts[number]}
        return self.model(*received, **keywords, **which)

    def _try(self, number: int, keywords: Mapping[str, Tensor]) -> Given:
        """Run the stage on zeros and return its outputs' shapes; random state and model stay as they are."""
        device = self.state.device
        with torch.no_grad(), accelerator.fork_random(device):
            zeros = [torch.zeros(one.shape, dtype=one.dtype, device=device) for one in self._received(number)]
            whole = self._run(number, tuple(zeros), keywords)
        if number == self.state.layout.stages - 1:
            if isinstance(whole, dict):
                names = tuple(whole)
                self._whole = lambda pieces: dict(zip(names, pieces, strict=True))
            elif isinstance(whole, Tensor):
                self._whole = lambda pieces: pieces[0]
        elif isinstance(whole, dict):
            raise BadInput(
                "stage", "output", expected="a tensor or a tuple of them between stages", found="a dict",
                todo="Give its values as a tuple: the next stage gets them by position, in order",
            )  # fmt: skip
        given = _tensors(whole)
        for one in given if len(given) > 1 or number < self.state.layout.stages - 1 else ():
            if len(one) != self.samples or one.dtype != given[0].dtype:
                raise BadInput(
                    "stage", "output", expected=f"tensors of one dtype, {self.samples} samples on dim 0",
                    found=f"{one.dtype} {tuple(one.shape)}",
                )  # fmt: skip
        return tuple(Travels(tuple(one.shape), one.dtype) for one in given)


def parts_of(model: nn.Module, state: ParallelState) -> tuple[Stage | None, ...]:
    """Return this rank's stages, which ``forward`` gets as ``stage=``; a single one is ``None``, not passed.

    ``BadInput`` if the layout has several stages a rank and the model has no matching ``stage``, or its
    forward takes none.
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
        todo = "Take stage=None; if it is given, run only that one of self.stage.parts"
        expected = f"a keyword stage, with virtual_stages={count}"
        raise BadInput("step", "model.forward", expected=expected, found="none", todo=todo)
    return stage.parts


def _tensors(given: Any) -> tuple[Tensor, ...]:
    found = (
        tuple(given.values()) if isinstance(given, dict) else given if isinstance(given, tuple) else (given,)
    )
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
