"""Find the first activation, or gradient of one, that differs from one process, and the module to blame."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from torch import Tensor

from ...parallel_state import Layout
from ..layouts import largest, zero_share
from .finding import Fault, module_of, tensor_groups
from .recorder import Event
from .relation import Placement, place
from .run import Witnessed

Order = Literal["forward", "backward"]

_SUM = "reduce_from_tensor (leave_tensor under sequence parallelism), or a RowParallelLinear"
_COPY = "copy_to_tensor (enter_tensor under sequence parallelism), or a ColumnParallelLinear"


def first_wrong_module(
    layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float, order: Order
) -> Fault | None:
    """Return the first module whose activation, or for ``backward`` its gradient, differs, or whose partial
    values nothing sums.
    """
    whole, parts = getattr(one.seen, order), [getattr(rank.seen, order) for rank in ranks]
    waiting: list[Event] = []  # partial values that nothing has summed so far
    for event, found in placements(layout, whole, parts, tolerance):
        if found.kind == "partial":
            waiting.append(event)
        elif found.settled:
            waiting = [each for each in waiting if not _sums(event, each, order)]
        elif waiting:
            return _unsummed(waiting[0], found.relative, order)
        else:
            return _differs(event, found, order, {each.module for each in whole})
    if order == "backward":
        return _unsummed(waiting[0], 1.0, order, last=True) if waiting else None
    return _unsummed(waiting[0], 1.0, order) if waiting and waiting[-1].module == "" else None


def _differs(event: Event, found: Placement, order: Order, called: Collection[str]) -> Fault:
    module = event.module
    if order == "backward":
        said = f"the gradient of its {event.side} differs"
    elif event.side == "input":
        module, said = _caller(event.module, called), f"what it gives to {event.module} differs"
    else:
        said = "its output differs"
    note = f": {found.note}" if found.note else ""
    return Fault(module, order, found.relative, f"{said} by {found.relative:.1e}{note}")


def placements(
    layout: Layout, one: Mapping[Event, Tensor], ranks: Sequence[Mapping[Event, Tensor]], tolerance: float
) -> Iterator[tuple[Event, Placement]]:
    """Yield each event of the one process, in order, and how the tensor ranks that saw it hold it."""
    floats = [x for x in one.values() if x.is_floating_point()]
    least = max((zero_share(x.dtype) * largest(x) for x in floats), default=0.0)
    apart = _called_apart(layout, ranks)
    for event, whole in one.items():
        if event.module in apart:
            continue
        for group in tensor_groups(layout, ranks):
            parts = [rank[event] for rank in group if event in rank]
            if len(parts) == len(group):
                yield event, place(whole, parts, tolerance=tolerance, least=max(least, 1e-300))


def _called_apart(layout: Layout, ranks: Sequence[Mapping[Event, Tensor]]) -> set[str]:
    """Return the modules that several pipeline ranks call: a rank numbers its own calls, one process all.

    Their inputs and outputs are compared as those of other modules, and by their gradients.
    """
    places: dict[str, set[int]] = {}
    for rank, seen in enumerate(ranks):
        for event in seen:
            places.setdefault(event.module, set()).add(layout.coordinates(rank).pipeline)
    return {module for module, found in places.items() if len(found) > 1}


def _caller(module: str, called: Collection[str]) -> str:
    """Return the module whose forward calls this one: lists and dicts of modules have no forward."""
    above = module_of(module)
    while above and above not in called:
        above = module_of(above)
    return above


def _sums(settled: Event, waiting: Event, order: Order) -> bool:
    """Return whether a partial value must have been summed where another event has a whole one.

    It has if the module around it gives a whole output, or its caller goes on with a whole input; in the
    backward, which runs the other way, outputs are what inputs are in the forward.
    """
    behind, before = ("output", "input") if order == "forward" else ("input", "output")
    if settled.side == behind:
        return _within(waiting.module, settled.module)
    return settled.side == before and module_of(settled.module) == module_of(waiting.module)


def _within(module: str, other: str) -> bool:
    return module != other and (not other or module.startswith(other + "."))


def _unsummed(event: Event, relative: float, order: Order, *, last: bool = False) -> Fault:
    if order == "forward":
        what, todo = f"its {event.side} is", f"after it: {_SUM}"
    else:
        what, todo = f"the gradient of its {event.side} is", f"where it begins: {_COPY}"
    said = f"{what} only a part on each rank, and nothing adds them up. A collective is missing {todo}"
    return Fault(event.module, order, relative, said, unsummed=last)
