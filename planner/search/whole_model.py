"""Count the parameters of the model that a layout is searched for."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ...parallel_state import declarations
from ...simulation.model_flops import active_parameters
from .request import Request


@dataclass(frozen=True, slots=True)
class Parameters:
    """Count the parameters of a model: ``whole``, those that are ``trained``, and the ``active`` ones, which
    one token uses (fewer where a router chooses experts).
    """

    whole: int
    trained: int
    active: int


def parameters_of(request: Request) -> Parameters:
    """Return the parameters of the whole model in each of these counts."""
    model = request.family.build(request.config)
    stated = {
        name: declaration for name, declaration in declarations(model).items() if not declaration.buffer
    }
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    sizes = {name: prod(declaration.shape) for name, declaration in stated.items()}
    of_trained = sum(size for name, size in sizes.items() if name in trained)
    return Parameters(sum(sizes.values()), of_trained, active_parameters(model))
