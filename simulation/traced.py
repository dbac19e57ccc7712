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
from ..parallel_state.engine.weight_gradients import Group, compute_input_gradients, compute_weight_gradients
from .live_bytes import Storage
from .recorder import Recorder
from .trace import InTwo, Trace


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
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.like = [(x.shape, x.dtype, x.device) for x in outputs]
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
    in_two: InTwo = False,
    scalar: bool = False,
) -> Trace:
    """Trace ``run(x)`` of an ``x`` that ``make`` makes, and its backward, inside ``shapes_only``.

    ``run`` returns a tensor or several. ``parameters``: those of the piece; ``others``: those that it uses
    and that belong to another piece, whose gradients are not counted. ``apart``: modules of the piece whose
    parameters FSDP gathers and sums by themselves. ``reached``: whether a backward comes to ``x``.
    ``in_two``: whether the backward has two parts; the second one is noted where the piece is ``"followed"``
    by others. ``scalar``: whether ``run`` gives a loss, whose gradient is a number.
    """
    weights, summed, runs = [*parameters, *others], dict[int, int](), list[int]()
    of_apart = [weight for module in apart for weight in module.parameters()]
    recorder = Recorder({weight.untyped_storage(): weight.requires_grad for weight in weights})

    def note(parameter: Tensor) -> None:
        summed[id(parameter)] = recorder.at

    hooks = []
    for weight in weights:
        weight.grad = None
        if weight.requires_grad:
            hooks.append(weight.register_post_accumulate_grad_hook(note))
    for module in apart:
        hooks.append(module.register_forward_pre_hook(lambda *_: runs.append(recorder.at)))
        hooks.append(module.register_forward_hook(lambda *_: runs.append(recorder.at)))
    anchor = torch.empty((), requires_grad=reached)
    with recorder:
        if in_two:
            inputs = [make().requires_grad_(reached)]
        else:
            inputs = [_Given.apply(anchor, make, recorder.end_chain) if reached else make()]
        first = recorder.storage(inputs[0])
        outputs = tensors_in(run(inputs[0]))
        if not in_two:
            inputs.clear()
        recorder.end_chain()
        size = sum(x.nbytes for x in outputs if recorder.storage(x) is not None)
        sizes = {"kept": recorder.now - size, "kept_input": 0 if first is None else first.size}
        instants = {"forward": [after - sizes["kept"] for after in recorder.after]}
        recorder.phase, start = "backward", recorder.at + 1
        if any(x.requires_grad for x in outputs):
            if in_two:
                # The graph of what follows keeps that of the piece.
                follows = [x.grad_fn for x in outputs] if in_two == "followed" else []
                groups, sizes_left, peaks = _first_part(recorder, outputs, inputs, weights, sizes["kept"])
                sizes |= sizes_left
                instants |= peaks
                if follows:
                    sizes["freed"], peaks = _second_part(recorder, weights, groups)
                    # Instants of a backward begin where its first part does.
                    before = [0] * len(instants["first_part"])
                    instants |= {name: before + of_second for name, of_second in peaks.items()}
                del groups, follows
            else:
                total = outputs.pop() if scalar else _Taken.apply(*outputs)
                outputs.clear()
                total.backward()
                del total
                owned = parameters, others, of_apart
                sizes_left, peaks = _in_backward(recorder, start, sizes["kept"], *owned, summed, runs)
                sizes |= sizes_left
                instants |= peaks
    for hook in hooks:
        hook.remove()
    for weight in weights:
        weight.grad = None
    recorder.end_chain()
    sizes |= {name: max(values, default=0) for name, values in instants.items()}
    sizes["weights"], sizes["apart"] = (sum(x.nbytes for x in weights) for weights in (parameters, of_apart))
    steps = tuple(recorder.steps)
    return Trace(**sizes, sliced=recorder.sliced, steps=steps, instants=instants)


def _in_backward(
    recorder: Recorder,
    start: int,
    forward_bytes: int,
    parameters: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    separate: Sequence[nn.Parameter],
    summed: dict[int, int],
    runs: Sequence[int],
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return the bytes of the gradients, and those beside ``forward_bytes`` at each instant of a backward
    that began after the operator before ``start``.
    """
    gradients: dict[int, Storage] = {}
    for weight in (*parameters, *others):
        storage = None if weight.grad is None else recorder.storage(weight.grad)
        if storage is not None:
            gradients[id(weight)] = storage
    own = {gradients[id(weight)]: weight.nbytes for weight in parameters if id(weight) in gradients}
    apart = {gradients[id(weight)] for weight in others if id(weight) in gradients}

    def beside(leaving_out: set[Storage]) -> list[int]:
        return [after - forward_bytes for after in recorder.bytes(start, leaving_out)]

    bare = beside(apart | own.keys())
    with_gradient = [*bare]
    for weight in parameters:
        # An operator may make gradients of several weights.
        if (storage := gradients.get(id(weight))) is not None:
            for instant in range(max(storage.made - start, 0), summed[id(weight)] + 1 - start):
                with_gradient[instant] += own[storage]
    instants = {"backward": bare, "with_gradient": with_gradient, "with_gradients": beside(apart)}
    sizes, windows = {"gradients": sum(own.values())}, list[tuple[str, list[int], int, int]]()
    reruns = [at - start for at in runs if at >= start]
    if experts := {gradients[id(weight)]: id(weight) for weight in separate if id(weight) in gradients}:
        without, all_made = beside(apart | experts.keys()), instants["with_gradients"]
        first = max(min(storage.made for storage in experts) - start, 1)
        last = max(summed[number] for number in experts.values()) - start
        sizes |= {"experts": sum(own[storage] for storage in experts), "at_experts": without[last]}
        reruns = reruns or [first - 1]
        windows = [
            ("to_experts", without, 0, first),
            ("in_experts", all_made, first, last + 1),
            ("after_experts", without, last, len(without)),
            ("copied_experts", without, reruns[0], reruns[-1] + 1),
        ]
    elif reruns:  # of frozen ones
        windows = [("copied_experts", instants["with_gradients"], reruns[0], reruns[-1] + 1)]
    for name, after, begin, end in windows:
        instants[name] = [after[at] if begin <= at < end else -forward_bytes for at in range(len(after))]
    return sizes, instants


def _first_part(
    recorder: Recorder,
    outputs: list[Tensor],
    inputs: list[Tensor],
    weights: Sequence[nn.Parameter],
    forward_bytes: int,
) -> tuple[Sequence[Group], dict[str, int], dict[str, list[int]]]:
    """Run the first part of a backward in two; return what is left to compute, what it leaves, and what it
    holds at each instant.
    """
    start = recorder.at + 1
    grads = [torch.empty_like(x) for x in outputs]
    reached = [x for x in inputs if x.requires_grad]
    trained = iter([weight for weight in weights if weight.requires_grad])
    groups = compute_input_gradients(outputs, grads, reached, trained)
    size = sum(x.nbytes for x in outputs)
    grads.clear()
    outputs.clear()
    for x in reached:
        x.grad = None
    instants = [after - size - forward_bytes for after in recorder.bytes(start)]
    sizes = {"waiting": recorder.alive_since(start), "between": recorder.now - forward_bytes}
    return groups, sizes, {"first_part": instants}


def _second_part(
    recorder: Recorder, weights: Sequence[nn.Parameter], groups: Sequence[Group]
) -> tuple[int, dict[str, list[int]]]:
    """Run the second part of a backward in two; return what it frees, and what it holds at each instant
    beside what the first one left.
    """
    start, before = recorder.at + 1, recorder.now
    compute_weight_gradients(weights, groups)
    storages = [recorder.storage(weight.grad) for weight in weights if weight.grad is not None]
    grads = sorted({storage for storage in storages if storage is not None}, key=lambda storage: storage.made)
    with_all = [size - before for size in recorder.bytes(start)]
    with_one = [size - before for size in recorder.bytes(start, grads)]
    ends = [*(after.made for after in grads[1:]), recorder.at + 1]
    for storage, until in zip(grads, ends, strict=False):  # a frozen piece has none
        for instant in range(storage.made - start, until - start):
            with_one[instant] += storage.size
    freed = before - recorder.now + sum(storage.size for storage in grads)
    return freed, {"second_with_gradient": with_one, "second_with_gradients": with_all}
