"""Reach autograd: what a backward pass wants, what follows it, every operator; and the compiler's limits."""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from ...system.errors import BadInput

#: A context in which operators compute with numbers, although code outside of it is traced or counted.
outside_modes = _disable_current_modes


class UncompiledMode(TorchDispatchMode):
    """Be a mode that torch calls as it is: else it imports its compiler, and asks it at each operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep torch from importing its compiler inside this context, where nothing may be compiled.

    Torch has operators written in Python, each of which at its first call imports the compiler, which takes
    about a second, to tell it to leave the operator alone. Once the compiler is there, what is compiled runs
    as it is written; a forward that calls ``torch.compile`` brings it in.
    """
    name = "torch._dynamo"
    if name in sys.modules:
        with torch.compiler.set_stance("force_eager"):  # in a mode of ours it would crash
            yield
        return
    as_written, compile_later = ExitStack(), torch.compile

    def compile_now(*args: Any, **kwargs: Any) -> Any:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
            as_written.enter_context(torch.compiler.set_stance("force_eager"))
        return compile_later(*args, **kwargs)

    left_alone = list[Any]()

    def disable(function: Callable[..., Any], *args: object, **kwargs: object) -> Callable[..., Any]:
        left_alone.append(function)
        return function

    def __getattr__(attribute: str) -> Any:  # another use of the compiler: it is imported
        if attribute.startswith("__"):  # asked of every module by ``inspect``
            raise AttributeError(attribute)
        sys.modules.pop(name, None)
        return getattr(importlib.import_module(name), attribute)

    stand_in: Any = ModuleType(name)
    stand_in.disable, stand_in.__getattr__ = disable, __getattr__
    stand_in.config = SimpleNamespace(error_on_nested_fx_trace=True)  # read by activation checkpointing
    sys.modules[name] = stand_in
    torch.compile = cast(Any, compile_now)
    try:
        with as_written:
            yield
    finally:
        torch.compile = compile_later
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        for function in left_alone:  # they ask again, for the compiler may come
            vars(function).pop("__dynamo_disable", None)


@contextmanager
def replaced(
    places: Iterable[tuple[Any, str]], method: Callable[[Any, str], Callable[..., Any]]
) -> Iterator[None]:
    """Put ``method(owner, name)`` in the place of these methods and functions of torch's meanwhile."""
    before = [(owner, name, vars(owner).get(name)) for owner, name in places]
    for owner, name, _ in before:
        setattr(owner, name, method(owner, name))
    try:
        yield
    finally:
        for owner, name, own in before:
            if own is None:  # it is the class's
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def fake_mode() -> Any | None:
    """Return the mode of torch's fake tensors that is entered, without importing them."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def other_modes() -> bool:
    """Tell whether operators called here are seen by a mode that is not torch's of fake tensors."""
    return bool(torch._C._len_torch_dispatch_stack() > (fake_mode() is not None))


def after_backward(call: Callable[[], None]) -> None:
    """Call this at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def in_backward() -> bool:
    """Tell whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def differentiates_again() -> bool:
    """Tell, inside a backward, whether its gradients may be differentiated too (``create_graph=True``)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def differentiable_once(what: str, todo: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a backward refuse ``create_graph=True``: a gradient of its gradients would be that of constants."""

    def checking(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def checked(ctx: Any, *grads: Tensor) -> Any:
            if differentiates_again():
                expected = f"false with {what}, which has no gradients of gradients"
                raise BadInput("backward", "create_graph", expected=expected, found=True, todo=todo)
            return backward(ctx, *grads)

        return checked

    return checking


def forward_number() -> int:
    """Return the number that this thread gives to the next operator of which autograd takes notice."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def backward_number() -> int | None:
    """Return the number of the operator whose backward runs in this thread; ``None`` outside a backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def wanted_gradients(ctx: Any) -> tuple[bool, ...]:
    """Return for each input of an autograd ``Function`` whether the backward that runs wants its gradient.

    ``ctx.needs_input_grad`` states what any backward may want. A schedule with a backward in two parts wants
    the gradients of activations in the first one, and those of weights in the second one.
    """
    needed: tuple[bool, ...] = ctx.needs_input_grad
    if not any(needed) or torch.compiler.is_compiling():
        return needed
    # One function for each input that is a tensor; those of the others need no gradient.
    before = iter([node for node, _ in ctx.next_functions if node is not None])
    return tuple(need and _runs(next(before)) for need in needed)


def _runs(function: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(function))
    except RuntimeError:  # raised for a parameter whose gradient ``torch.autograd.grad`` was asked for
        return True


def allow_graphs(count: int) -> None:
    """Let ``torch.compile`` make ``count`` graphs of one function; by default it gives up after 8."""
    config: Any = importlib.import_module("torch._dynamo.config")
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)


def compiler_errors() -> type[Exception]:
    """Return the class of what ``torch.compile`` raises when it cannot compile."""
    errors: type[Exception] = importlib.import_module("torch._dynamo.exc").TorchDynamoException
    return errors


class OutsideOfForward:
    """Be the hook of a shard, which gets no gradient but where the model's own forward is passed by."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, grad: Tensor) -> None:
        """Refuse the gradient."""
        raise BadInput(
            "backward", self.name, expected="a gradient of the model's forward, which data ranks add up",
            found="one of a computation with the parameter outside of it",
            todo="Call the model; name other methods of it with torch's register_fsdp_forward_method",
        )  # fmt: skip


def has_hooks(parameter: torch.Tensor, *, of_sums: bool) -> bool:
    """Tell whether a backward that comes to this parameter calls a hook; ``of_sums``: one that is registered
    by ``register_post_accumulate_grad_hook`` counts too.
    """
    hooks = [*(parameter._backward_hooks or {}).values()]
    own = all(isinstance(hook, OutsideOfForward) for hook in hooks)
    return not own or bool(of_sums and parameter._post_accumulate_grad_hooks)


def call_gradient_hooks(parameter: torch.Tensor) -> None:
    """Call the hooks of a parameter whose gradient is complete, as a backward does that comes to it."""
    for hook in [*(parameter._post_accumulate_grad_hooks or {}).values()]:
        hook(parameter)
