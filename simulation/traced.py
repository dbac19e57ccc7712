"""Trace a piece of a model: run its forward and backward once without numbers, and note what a rank holds.

Tensors are torch's fake ones, which have a shape and no memory: a block of any size takes some 50 ms. Noted
are the bytes that are alive after each operator, each collective, and each operator's FLOPs and bytes.
Memory that an operator uses only while it runs is not seen.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel_state.engine import tensors_in
from ..parallel_state.engine.weight_gradients import compute_input_gradients
from .live_bytes import Storage
from .recorder import Recorder
from .trace import Trace


class _Given(torch.autograd.Function):
    """Make what a piece is given: nobody else holds it, and its gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor], end: Callable[[], None]) -> Tensor:
        ctx.end = end
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.end()  # while the gradient is there, which another piece uses
        return None, None, None


class _Taken(torch.autograd.Function):
    """Take what a piece gives; its gradient is made in the backward, and nobody else holds it."""

    @staticmethod
    def forward(ctx: Any, *made: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in made]
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


def trace(
    run: Callable[[Tensor], Any],
    make: Callable[[], Tensor],
    parameters: Sequence[nn.Parameter],
    *,
    others: Sequence[nn.Parameter] = (),
    apart: Sequence[nn.Module] = (),
    reached: bool = True,
    in_two: bool = False,
    scalar: bool = False,
) -> Trace:
    """Trace ``run(x)`` of an ``x`` that ``make`` makes, and its backward, inside ``shapes_only``.

    ``run`` returns a tensor or several. ``parameters``: those of the piece; ``others``: those that it uses
    and that belong to another piece, whose gradients are not counted. ``apart``: modules of the piece whose
    parameters FSDP gathers and sums by themselves. ``reached``: whether a backward comes to ``x``.
    ``in_two``: whether the backward has two parts, of which the first one is noted. ``scalar``: whether
    ``run`` gives a loss, whose gradient is a number.
    """
    weights = [*parameters, *others]
    of_apart = [weight for module in apart for weight in module.parameters()]
    recorder = Recorder({weight.untyped_storage(): weight.requires_grad for weight in weights})

    for weight in weights:
        weight.grad = None
    anchor = torch.empty((), requires_grad=reached)
    with recorder:
        if in_two:
            inputs = [make().requires_grad_(reached)]
        else:
            inputs = [_Given.apply(anchor, make, recorder.end_chain) if reached else make()]
        first = recorder.storage(inputs[0])
        made = tensors_in(run(inputs[0]))
        if not in_two:
            inputs.clear()
        recorder.end_chain()
        size = sum(x.nbytes for x in made if recorder.storage(x) is not None)
        sizes = {"kept": recorder.now - size, "made": size, "kept_input": 0 if first is None else first.size}
        instants = {"forward": [after - sizes["kept"] for after in recorder.after]}
        recorder.phase, start = "backward", recorder.at + 1
        if any(x.requires_grad for x in made):
            if in_two:
                left, peaks = _first_part(recorder, made, inputs, weights, sizes["kept"])
            else:
                total = made.pop() if scalar else _Taken.apply(*made)
                made.clear()
                total.backward()
                del total
                of = parameters, others, of_apart
                left, peaks = _in_backward(recorder, start, sizes["kept"], *of)
            sizes |= left
            instants |= peaks
    for weight in weights:
        weight.grad = None
    recorder.end_chain()
    sizes |= {name: max(values, default=0) for name, values in instants.items()}
    own = sum(weight.nbytes for weight in parameters)
    steps = tuple(recorder.steps)
    return Trace(**sizes, weights=own, sliced=recorder.sliced, steps=steps, instants=instants)


def _in_backward(
    recorder: Recorder,
    start: int,
    forward_bytes: int,
    parameters: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    separate: Sequence[nn.Parameter],
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return the bytes of the gradients, and those beside ``forward_bytes`` at each instant of a backward
    that began after the operator before ``start``.
    """
    made: dict[int, Storage] = {}
    for weight in (*parameters, *others):
        storage = None if weight.grad is None else recorder.storage(weight.grad)
        if storage is not None:
            made[id(weight)] = storage
    own = {made[id(weight)]: weight.nbytes for weight in parameters if id(weight) in made}
    apart = {made[id(weight)] for weight in others if id(weight) in made}

    def beside(leaving_out: set[Storage]) -> list[int]:
        return [after - forward_bytes for after in recorder.bytes(start, leaving_out)]

    instants = {"backward": beside(apart | own.keys()), "with_gradients": beside(apart)}
    sizes = {"gradients": sum(own.values())}
    if experts := {made[id(weight)] for weight in separate if id(weight) in made}:
        last = max(storage.made for storage in experts) - start
        sizes["experts"] = sum(own[storage] for storage in experts)
        sizes["at_experts"] = beside(apart | experts)[last]
    return sizes, instants


def _first_part(
    recorder: Recorder,
    made: list[Tensor],
    inputs: list[Tensor],
    weights: Sequence[nn.Parameter],
    forward_bytes: int,
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Run the first part of a backward in two; return what it leaves, and what it holds at each instant."""
    start = recorder.at + 1
    grads = [torch.empty_like(x) for x in made]
    reached = [x for x in inputs if x.requires_grad]
    trained = iter([weight for weight in weights if weight.requires_grad])
    left = compute_input_gradients(made, grads, reached, trained)
    size = sum(x.nbytes for x in made)
    grads.clear()
    made.clear()
    for x in reached:
        x.grad = None
    instants = [after - size - forward_bytes for after in recorder.bytes(start)]
    waiting = recorder.alive_since(start)
    del left  # which holds it
    return {"waiting": waiting}, {"first_part": instants}
