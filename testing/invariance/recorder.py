"""Record the inputs and outputs of every module and their gradients, in the order of computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Event(NamedTuple):
    """Name a tensor: the ``leaf``-th of the ``call``-th call of ``module`` in micro-batch ``micro``.

    Micro-batches are counted over all ranks. ``side`` is ``input`` or ``output``.
    """

    micro: int
    module: str
    call: int
    side: str
    leaf: int


@dataclass
class Seen:
    """Hold tensors of the forward and their gradients, each in the order in which they came."""

    forward: dict[Event, Tensor] = field(default_factory=dict)
    backward: dict[Event, Tensor] = field(default_factory=dict)


class Witness:
    """Record every module's inputs and outputs with hooks, until ``leave``.

    ``first``: the number of this rank's first micro-batch. Each input or output of a module is copied at that
    place, so that its gradient is that of this one use. ``partly``: the model is one stage, so its own input
    and output are not recorded. Modules ``apart``, and those within them, are not recorded.
    """

    def __init__(
        self, model: nn.Module, *, first: int = 0, partly: bool = False, apart: Iterable[nn.Module] = ()
    ) -> None:
        self.seen = Seen()
        self._first, self._micro, self._partly = first, first - 1, partly
        self._begun: Counter[int] = Counter()
        self._calls: Counter[tuple[int, str]] = Counter()
        self._hooks = []
        unwatched = {within for one in apart for within in one.modules()}
        for name, module in model.named_modules():
            if module in unwatched:
                continue
            self._hooks += [
                module.register_forward_pre_hook(self._before(name), with_kwargs=True),
                module.register_forward_hook(self._after(name)),
            ]

    def leave(self) -> Seen:
        """Remove the hooks and return the record."""
        for hook in self._hooks:
            hook.remove()
        return self.seen

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not name and torch.is_grad_enabled():
                # Each stage of a rank takes all micro-batches, in order.
                stage: int = getattr(kwargs.get("stage"), "number", 0)
                self._micro = self._first + self._begun[stage]
                self._begun[stage] += 1
            self._calls[self._micro, name] += 1
            return self._note(name, "input", (args, kwargs))

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, given: Any) -> Any:
            return self._note(name, "output", given)

        return hook

    def _note(self, name: str, side: str, value: Any) -> Any:
        if not torch.is_grad_enabled() or (self._partly and not name):
            return value  # a trial run, to find shapes, is none of the step's
        micro, call, leaves = self._micro, self._calls[self._micro, name], Counter[str]()

        def note(tensor: Tensor) -> Tensor:
            event = Event(micro, name, call, side, leaves[side])
            leaves[side] += 1
            self.seen.forward[event] = tensor.detach().clone()
            if not tensor.requires_grad:
                return tensor
            copy = tensor * 1  # no view: what follows may change it in place
            copy.register_hook(lambda gradient: self._note_gradient(event, gradient))
            return copy

        return _each(value, note)

    def _note_gradient(self, event: Event, gradient: Tensor) -> None:
        # The first one counts: the second part of a split backward may come by again, on its way to a weight.
        if event not in self.seen.backward:
            self.seen.backward[event] = gradient.detach().clone()


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nest of tuples, lists and dicts, with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _each(one, change) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each(one, change) for one in value))
    if isinstance(value, tuple | list):
        return type(value)(_each(one, change) for one in value)
    return value
