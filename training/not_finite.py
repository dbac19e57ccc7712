"""Stop a run at a value that is not finite, and name step, rank and the first module that produced it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from ..layers import find_blocks
from ..parallel_state import ParallelState, PeerFailed, declarations, together
from ..parallel_state.engine import local_data, tensors_in
from ..system import whole_number
from .step import Step


@dataclass(frozen=True, order=True, slots=True)
class Origin:
    """State where the first value that is not finite appeared; the minimum over ranks is the first in time.

    ``order`` counts the outputs of modules in a micro-batch. The ranks of one stage call the same modules in
    the same order, and a collective brings a bad value of one rank to the other ranks a few outputs later. If
    several ranks report the same module, the rank whose part of the module's weights is bad comes first.
    """

    micro_batch: int
    stage: int
    order: int
    weights_are_finite: bool
    rank: int
    module: str


def find_first_non_finite(step: Step, number: int, batch: Any) -> NoReturn:
    """Raise ``PeerFailed`` that names the first module whose output is not finite; call it before the update.

    All ranks must call it, which they do because loss and norm are the same on every rank. It runs the
    forward pass again and checks the output of each module on every rank. If all outputs are finite, the
    fault is in the backward pass; then the error names the last parameter whose gradient is not finite.
    ``number``, of the step, counts from 1.
    """
    model, state = step.model, step.state
    # A compiled block would hide its modules.
    with looking(step) as events, torch.compiler.set_stance("force_eager"):
        step.forward(batch)
    event = None
    if events:
        weights = model.get_submodule(events[0].module).parameters()
        finite = all(_all_finite(local_data(weight)) for weight in weights)
        event = replace(events[0], weights_are_finite=finite)
    first = min(filter(None, together(lambda: event, state)), default=None)
    if first is not None:
        what = f"rank {first.rank}: the output of {first.module or 'the model'}"
    else:
        gradients = together(lambda: last_not_finite(model, state=state), state)
        # The last in the model; of its ranks the first, since the data axes are summed by now.
        named = [(-last[0], rank, last[1]) for rank, last in enumerate(gradients) if last is not None]
        what = f"rank {min(named)[1]}: the gradient of {min(named)[2]}" if named else "the loss"
    raise PeerFailed(f"step {number}: {what} is not finite; nothing was updated")


@contextmanager
def looking(step: Step) -> Iterator[list[Origin]]:
    """Check every module's output in the ``with`` block; list the first on this rank that is not finite.

    A module is checked before the module that contains it, so the innermost is named.
    """
    model, origins = step.model, list[Origin]()
    names = {module: name for name, module in model.named_modules()}
    count = {"outputs": 0, "micro_batches": -1, "stage": 0}
    first = next(iter(step.stages.parts))

    def begin(module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        part = named.get("stage")  # of several stages of a rank
        count["stage"] = first if part is None else part.number
        count["micro_batches"] += count["stage"] == first
        count["outputs"] = 0

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        count["outputs"] += 1
        if not origins and not _all_finite(output):
            place = (count["micro_batches"], count["stage"], count["outputs"])
            origins.append(Origin(*place, True, step.state.rank, name))

    hooks = [model.register_forward_pre_hook(begin, with_kwargs=True)]
    hooks += [module.register_forward_hook(partial(look, name)) for module, name in names.items()]
    try:
        yield origins
    finally:
        for hook in hooks:
            hook.remove()


def last_not_finite(model: nn.Module, *, state: ParallelState | None = None) -> tuple[float, str] | None:
    """Return the last parameter on this rank (the first in a backward pass) whose gradient holds a NaN or an
    infinity, after its place in the model: the number of its block, or before or behind all blocks.

    For a tied embedding this is the first stage's copy, because the last stage's copy holds the sum.
    """
    stage = 0 if state is None else state.at.pipeline
    declared, blocks = declarations(model), find_blocks(model)
    paths = [path for path, module in model.named_modules() if module in blocks]
    outside, last = -1.0, None
    for name, parameter in model.named_parameters():
        block = next((path for path in paths if name.startswith(f"{path}.")), None)
        outside = outside if block is None else math.inf
        grad = parameter.grad
        if grad is not None and not (declared[name].ends and stage) and not _all_finite(local_data(grad)):
            last = outside if block is None else whole_number(block.rpartition(".")[2]) or 0, name
    return last


def _all_finite(output: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(output, records=True))
