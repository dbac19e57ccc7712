"""Record the inputs and outputs of modules and their gradients, in the order of computation."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..parallel_state.engine import map_tensors


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


class Recorder:
    """Record the inputs and outputs of modules with hooks, until ``leave``.

    ``names``: of the modules; the model's own is empty. ``first``: the number of this rank's first
    micro-batch. Each input or output is copied at that place, so that its gradient is that of this one use;
    with ``outputs_only`` neither inputs nor gradients are recorded, and nothing is put into the graph.
    """

    def __init__(
        self, model: nn.Module, names: Collection[str], *, first: int = 0, outputs_only: bool = False
    ) -> None:
        self.seen = Seen()
        self._first, self._micro, self._outputs_only = first, first - 1, outputs_only
        self._begun: Counter[int] = Counter()
        self._calls: Counter[tuple[int, str]] = Counter()
        self._hooks = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for name, module in model.named_modules():
            if name in names:
                self._hooks += [
                    module.register_forward_pre_hook(self._before(name), with_kwargs=True),
                    module.register_forward_hook(self._after(name)),
                ]

    def leave(self) -> Seen:
        """Remove the hooks and return the record."""
        for hook in self._hooks:
            hook.remove()
        return self.seen

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            # Each stage of a rank takes all micro-batches, in order.
            stage: int = getattr(kwargs.get("stage"), "number", 0)
            self._micro = self._first + self._begun[stage]
            self._begun[stage] += 1

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._calls[self._micro, name] += 1
            return None if self._outputs_only else self._note(name, "input", (args, kwargs))

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            noted = self._note(name, "output", output)
            return None if self._outputs_only else noted

        return hook

    def _note(self, name: str, side: str, value: Any) -> Any:
        if not torch.is_grad_enabled():
            return value  # a trial run, to find shapes, is none of the step's
        micro, call, leaves = self._micro, self._calls[self._micro, name], count()

        def note(tensor: Tensor) -> Tensor:
            event = Event(micro, name, call, side, next(leaves))
            self.seen.forward[event] = tensor.detach().clone()
            if self._outputs_only or not tensor.requires_grad:
                return tensor
            copy = tensor * 1  # no view: what follows may change it in place
            copy.register_hook(lambda gradient: self._note_gradient(event, gradient))
            return copy

        return map_tensors(value, note)

    def _note_gradient(self, event: Event, gradient: Tensor) -> None:
        # The first one counts: the second part of a split backward may come by again, on its way to a weight.
        if event not in self.seen.backward:
            self.seen.backward[event] = gradient.detach().clone()
