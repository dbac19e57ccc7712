"""Trace a piece of a model: run its forward and backward once without numbers, and note what a rank holds.

Tensors are torch's fake ones, which have a shape and no memory: a block of any size takes some 50 ms. Noted
are the bytes that are alive after each operator, each collective, and each operator's FLOPs and bytes.
Memory that an operator uses only while it runs is not seen.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ..parallel_state import engine, local
from ..parallel_state.engine.weight_gradients import compute_input_gradients
from .asked_numbers import refuse_numbers
from .kernels import gpu_kernels
from .recorder import Recorder
from .tensors import tensors_of
from .trace import Trace
from .wait import Locals
from .waits import WAITS


@contextmanager
def without_numbers(
    modules: Iterable[nn.Module], compute: torch.dtype | None = None, *, gpu: bool
) -> Iterator[None]:
    """Give modules fake parameters and buffers on the host inside this context, parameters in ``compute``.

    ``gpu``: whether code chooses as on a GPU and calls its kernels. All of a trace, and what it is given,
    must be made inside.
    """
    with ExitStack() as stack:
        if gpu:
            stack.enter_context(engine.without_compiler())
            stack.enter_context(gpu_kernels())
            stack.enter_context(mock.patch.object(Tensor, "tolist", _meta_numbers))
        else:
            from ..parallel_state.engine.fake_tensors import FakeTensor, FakeTensorMode

            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(mock.patch.object(FakeTensor, "tolist", _numbers))
        device = "meta" if gpu else "cpu"
        fakes: dict[int, Tensor] = {}
        for module in {id(inner): inner for outer in modules for inner in outer.modules()}.values():
            places: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for place in places:
                for name, known in place.items():
                    if known is None:
                        continue
                    if id(known) not in fakes:
                        fakes[id(known)] = _fake(known, compute, device)
                    stack.callback(place.__setitem__, name, known)
                    place[name] = fakes[id(known)]
        yield


def _fake(known: Tensor, compute: torch.dtype | None, device: str) -> Tensor:
    parameter = isinstance(known, nn.Parameter)
    shape, dtype = local(known).shape, compute if parameter and compute else known.dtype
    fake = torch.empty(shape, dtype=dtype, device=device)
    return nn.Parameter(fake, requires_grad=known.requires_grad) if parameter else fake


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
    reached: bool = True,
    backward: bool = True,
    in_two: bool = False,
    scalar: bool = False,
    axes: dict[str, str] | None = None,
) -> Trace:
    """Trace ``run(x)`` of an ``x`` that ``make`` makes, and its backward, inside ``without_numbers``.

    ``run`` returns a tensor or several. ``parameters``: those of the piece; ``others``: those that it uses
    and that belong to another piece, whose gradients are not counted. ``reached``: whether a backward comes
    to ``x``. ``in_two``: whether the backward has two parts. ``scalar``: whether ``run`` gives a loss, whose
    gradient is a number. ``axes``: the axis of each process group by its name.
    """
    all_weights = [*parameters, *others]
    weights = {id(weight.untyped_storage()): weight.requires_grad for weight in all_weights}
    recorder, summed = Recorder(weights, axes), dict[int, int]()

    def note(parameter: Tensor) -> None:
        summed[id(parameter)] = recorder.at

    hooks = []
    for weight in all_weights:
        weight.grad = None
        if weight.requires_grad:
            hooks.append(weight.register_post_accumulate_grad_hook(note))
    anchor = torch.empty((), requires_grad=reached)
    with recorder:
        if in_two:
            inputs = [make().requires_grad_(reached)]
        else:
            inputs = [_Given.apply(anchor, make, recorder.end_chain) if reached else make()]
        first = recorder.number(inputs[0])
        made = tensors_of(out if isinstance(out := run(inputs[0]), tuple) else (out,))
        del out
        if not in_two:
            inputs.clear()
        recorder.end_chain()
        size = sum(x.nbytes for x in made if recorder.number(x) is not None)
        saved, kept_input = recorder.now - size, recorder.alive(first)
        instants = {"forward": [after - saved for after in recorder.bytes(0, recorder.at)]}
        results = dict(
            kept=saved,
            kept_input=kept_input,
            made=size,
            weights=sum(weight.nbytes for weight in parameters),
        )
        goes_back = backward and any(x.requires_grad for x in made)
        recorder.phase, start = "backward", recorder.at + 1
        if goes_back and in_two:
            sizes, instants["first_part"] = _in_two(recorder, made, inputs, all_weights, saved)
            results |= sizes
        elif goes_back:
            total = made.pop() if scalar else _Taken.apply(*made)
            made.clear()
            total.backward()
            del total
            results["gradients"], peaks = _in_backward(recorder, start, saved, parameters, others, summed)
            instants |= peaks
    for hook in hooks:
        hook.remove()
    for weight in all_weights:
        weight.grad = None
    operators = recorder.operators
    return Trace(
        **results,
        **{name: max(values, default=0) for name, values in instants.items()},
        collectives=tuple(recorder.collectives),
        operators=operators,
        instants=instants,
        steps=recorder.steps(operators),
    )


def _in_backward(
    recorder: Recorder,
    start: int,
    saved: int,
    parameters: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    summed: dict[int, int],
) -> tuple[int, dict[str, list[int]]]:
    """Return the bytes of the gradients, and those beside ``saved`` at each instant of a backward that began
    after the operator before ``start``.
    """
    numbers: dict[int, int] = {}
    for weight in (*parameters, *others):
        number = None if weight.grad is None else recorder.number(weight.grad)
        if number is not None:
            numbers[id(weight)] = number
    own = {numbers[id(weight)]: weight.nbytes for weight in parameters if id(weight) in numbers}
    apart = frozenset(numbers[id(weight)] for weight in others if id(weight) in numbers)
    end = recorder.at
    bare = [after - saved for after in recorder.bytes(start, end, apart | own.keys())]
    with_gradient = [*bare]
    for weight in parameters:
        number = numbers.get(id(weight))
        if number is not None:  # one operator may make the gradients of several weights
            for instant in range(max(recorder.born(number) - start, 0), summed[id(weight)] + 1 - start):
                with_gradient[instant] += own[number]
    staying = [after - saved for after in recorder.bytes(start, end, apart)]
    instants = {"backward": bare, "with_gradient": with_gradient, "with_gradients": staying}
    return sum(own.values()), instants


def _in_two(
    recorder: Recorder,
    made: list[Tensor],
    inputs: list[Tensor],
    parameters: Sequence[nn.Parameter],
    saved: int,
) -> tuple[dict[str, int], list[int]]:
    """Run the first part of a backward in two; return what it leaves, and what it holds at each instant."""
    start = recorder.at + 1
    grads = [torch.empty_like(x) for x in made]
    reached = [x for x in inputs if x.requires_grad]
    trained = iter([weight for weight in parameters if weight.requires_grad])
    left = compute_input_gradients(made, grads, reached, trained)
    size = sum(x.nbytes for x in made)
    grads.clear()
    made.clear()
    for x in reached:
        x.grad = None
    instants = [after - size - saved for after in recorder.bytes(start, recorder.at)]
    waiting = recorder.alive_since(start)
    between = recorder.now - saved
    del left
    return {"waiting": waiting, "between": between}, instants


_tolist = Tensor.tolist


def _meta_numbers(tensor: Tensor) -> Any:
    return _numbers(tensor) if tensor.is_meta else _tolist(tensor)


def _numbers(tensor: Tensor) -> Any:
    """Give the numbers of rows of experts that tokens choose evenly (``Tensor.tolist``)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        wait = _GIVES.get(frame.f_code.co_qualname)
        if (
            wait is not None
            and wait.gives is not None
            and frame.f_code.co_filename.endswith(wait.place.partition(":")[0])
        ):
            return wait.gives(tensor, Locals(frame))
        frame = frame.f_back
    refuse_numbers("tolist")
    return _zeros(tensor.shape)


#: What the host reads, as on the list of the places where it waits for a device.
_GIVES = {wait.place.partition(": ")[2]: wait for wait in WAITS if wait.gives is not None}


def _zeros(shape: Sequence[int]) -> Any:
    return 0 if not shape else [_zeros(shape[1:]) for _ in range(shape[0])]
