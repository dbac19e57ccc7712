"""Refuse wrong arguments of layers in one line, before torch raises an error of many lines."""

from __future__ import annotations

from torch import Tensor

from ..parallel_state import BadInput, ParallelState


def check_no_state(value: object, layer: str, key: str) -> None:
    """Refuse a state that is given by position: the layer would take it for another argument and cut
    nothing.
    """
    if isinstance(value, ParallelState):
        todo = "The state is a keyword: state=..."
        raise BadInput(layer, key, expected="no state", found="a ParallelState", todo=todo)


def check_width(x: Tensor, width: int, layer: str, todo: str) -> None:
    """Check that the last dim of the input is the layer's ``in_features``."""
    if x.shape[-1] != width:
        expected, shape = f"{width} features on the last dim", f"shape {tuple(x.shape)}"
        raise BadInput(layer, "input", expected=expected, found=shape, todo=todo)
