"""List the boxes of a model that a rank stores: one for each parameter, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ..parallel_state import Box, ParallelState, declarations, stored_box
from ..parallel_state.engine import local_data


@dataclass(frozen=True, slots=True)
class Place:
    """Hold a parameter and the box of the whole tensor that this rank stores, padding left out."""

    name: str
    parameter: nn.Parameter
    box: Box
    padded: bool

    def part(self, tensor: Tensor) -> Tensor:
        """Return the local part of the parameter, or of one of its moments. It shares the tensor's memory.

        Rows of padding are set to zero and left out.
        """
        local_part = local_data(tensor)
        if self.padded:
            rows = self.box.shape[0]
            local_part[rows:].zero_()
            local_part = local_part[:rows]
        return local_part


def places(model: nn.Module, state: ParallelState) -> list[Place]:
    """List every parameter of the model; the box is empty if this rank stores only padding of it."""
    stated = declarations(model)
    rank_places = []
    for name, parameter in model.named_parameters():
        box = stored_box(parameter, stated[name], state)
        true = stated[name].true_part(box)
        rank_places.append(Place(name, parameter, true, true != box))
    return rank_places


def stored_parts(
    model: nn.Module, state: ParallelState, choose: Callable[[nn.Parameter], Tensor | None] | None = None
) -> Iterator[tuple[str, Tensor, Box]]:
    """Yield, for each parameter, its name, this rank's part of the tensor, and the box of this part.

    The part has no padding and shares the memory of the parameter. ``choose`` replaces a parameter by another
    tensor of its shape, such as a moment, or leaves it out with ``None``. Empty parts are left out.
    """
    for place in places(model, state):
        chosen = place.parameter if choose is None else choose(place.parameter)
        if chosen is not None:
            part = place.part(chosen)
            if place.box.size:
                yield place.name, part, place.box
