"""Count the parameters of the model that a layout is searched for."""

from __future__ import annotations

from math import prod

from ..parallel_state import declarations
from .request import Request


def parameters_of(request: Request) -> tuple[int, int]:
    """Return the parameters of the whole model, and those that are trained."""
    model = request.family.build(request.config)
    stated = {name: one for name, one in declarations(model).items() if not one.buffer}
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    sizes = {name: prod(one.shape) for name, one in stated.items()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if name in trained)
