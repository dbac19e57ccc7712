"""Let a block's modules see whole sequences under sequence parallelism, and what is between them pieces.

A module that holds matrices (attention, a feed-forward net, experts) is a region: its tokens are gathered
where it begins, it computes as without sequence parallelism, and each rank keeps its own tokens of what it
gives. Norms, and sums of residuals, compute this rank's tokens alone.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...layers import RowParallelLinear
from ...parallel_state import ParallelState
from ...parallel_state.engine import accelerator
from .layers import SplitRow, gives_parts


def without_sequence(state: ParallelState) -> ParallelState:
    """Return the same rank's state in a layout whose activations are whole."""
    made = copy(state)
    made.layout, made.around = replace(state.layout, sequence=False), state
    return made


def regions_of(block: nn.Module, path: str) -> list[str]:
    """Return the paths of a block's modules that hold matrices, or modules with parameters."""
    return [
        f"{path}.{name}"
        for name, child in block.named_children()
        if any(parameter.dim() > 1 for parameter in child.parameters())
    ]


#: Gathers or splits a tensor along a dim.
Change = Callable[..., Tensor]


def enter(module: nn.Module, width: int, state: ParallelState, change: Change) -> None:
    """Gather or split the tokens of what a module is given, in place."""

    def entered(_: nn.Module, args: Any, named: dict[str, Any]) -> Any:
        return _changed(args, width, state, change), {
            name: _changed(x, width, state, change) if name in ("hidden_states", "x", "residual") else x
            for name, x in named.items()
        }

    module.register_forward_pre_hook(entered, with_kwargs=True)


def leave(module: nn.Module, width: int, state: ParallelState, change: Change) -> None:
    """Gather or split the tokens of what a module gives, in place."""
    module.register_forward_hook(lambda module, args, output: _changed(output, width, state, change))


def _changed(x: Any, width: int, state: ParallelState, change: Change) -> Any:
    """Change hidden states, (B, S, D) or (tokens, D), among what a module is given or gives."""
    if isinstance(x, tuple):
        return tuple(_changed(part, width, state, change) for part in x)
    states = isinstance(x, Tensor) and x.dim() in (2, 3) and x.shape[-1] == width and x.is_floating_point()
    return change(x, state, dim=x.dim() - 2) if states else x


def drop_parts_apart(owner: nn.Module, state: ParallelState) -> None:
    """Let each tensor rank draw from a stream of its own between a module's linears that give it a part and
    the one that takes it, in place: what is dropped there is of numbers that no other rank has.
    """
    before = list[tuple[torch.Generator, Tensor]]()

    def enter(module: nn.Module, args: Any, output: Any) -> None:
        if module.training and not before:
            seed = int(torch.randint(2**62, (), device="cpu"))
            before.extend((each, each.get_state()) for each in accelerator.generators(state.device))
            torch.manual_seed(seed + state.tensor.index)

    def leave(module: nn.Module, args: Any) -> None:
        for generator, was in before:
            generator.set_state(was)
        before.clear()

    layers = [*owner.children()]
    rows = [
        layer for layer in layers if isinstance(layer, RowParallelLinear) and not isinstance(layer, SplitRow)
    ]
    for layer in layers if rows else ():
        if gives_parts(layer):
            layer.register_forward_hook(enter)
    for layer in rows:
        layer.register_forward_pre_hook(leave)
    owner.register_forward_pre_hook(lambda module, args: before.clear())  # a recomputation may stop between
