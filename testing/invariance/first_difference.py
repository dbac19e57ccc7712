"""Find the first activation, or gradient of one, that differs from one process, and the module to blame."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch import Tensor

from ...parallel_state import Layout
from .finding import Fault, module_of, tensor_groups, with_note
from .recorder import Event
from .relation import Placement, place
from .run import Witnessed

_SUM = "reduce_from_tensor (leave_tensor under sequence parallelism), or a RowParallelLinear"
_COPY = "copy_to_tensor (enter_tensor under sequence parallelism), or a ColumnParallelLinear"


def first_forward(
    layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float
) -> Fault | None:
    events = placements(layout, one.seen.forward, [r.seen.forward for r in ranks], tolerance)
    waiting, different = _until_one_differs(events, _after)
    if different is None:
        return _unsummed(waiting[0], 1.0, "forward") if waiting and waiting[-1].module == "" else None
    event, found = different
    if waiting:
        return _unsummed(waiting[0], found.relative, "forward")
    if event.side == "input":
        asker = _caller(event.module, {each.module for each in one.seen.forward})
        said = f"what it gives to {event.module} differs by {found.relative:.1e}"
        return Fault(asker, "forward", found.relative, with_note(said, found.note))
    said = f"its output differs by {found.relative:.1e}"
    return Fault(event.module, "forward", found.relative, with_note(said, found.note))


def first_backward(
    layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float
) -> Fault | None:
    events = placements(layout, one.seen.backward, [r.seen.backward for r in ranks], tolerance)
    waiting, different = _until_one_differs(events, _before)
    if different is None:
        return _unsummed(waiting[0], 1.0, "backward", last=True) if waiting else None
    event, found = different
    if waiting:
        return _unsummed(waiting[0], found.relative, "backward")
    said = f"the gradient of its {event.side} differs by {found.relative:.1e}"
    return Fault(event.module, "backward", found.relative, with_note(said, found.note))


def _until_one_differs(
    events: Iterator[tuple[Event, Placement]], summed_by: Callable[[Event, Event], bool]
) -> tuple[list[Event], tuple[Event, Placement] | None]:
    """Return the partial values that nothing has summed so far, and the first event that differs, if any."""
    waiting: list[Event] = []
    for event, found in events:
        if found.kind == "partial":
            waiting.append(event)
        elif found.settled:
            waiting = [each for each in waiting if not summed_by(each, event)]
        else:
            return waiting, (event, found)
    return waiting, None


def placements(
    layout: Layout, one: Mapping[Event, Tensor], ranks: Sequence[Mapping[Event, Tensor]], tolerance: float
) -> Iterator[tuple[Event, Placement]]:
    """Yield each event of the one process, in order, and how the tensor ranks that saw it hold it."""
    least = 1e-6 * max(
        (float(x.abs().max()) for x in one.values() if x.is_floating_point() and x.numel()), default=0.0
    )
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


def _after(waiting: Event, settled: Event) -> bool:
    """Return whether a partial activation has been summed by now.

    It has if the module around it gives a whole output, or its caller goes on with a whole input.
    """
    inside = settled.side == "output" and _within(waiting.module, settled.module)
    return inside or (settled.side == "input" and module_of(settled.module) == module_of(waiting.module))


def _before(waiting: Event, settled: Event) -> bool:
    """Return the same as ``_after`` for gradients, which run the other way."""
    inside = settled.side == "input" and _within(waiting.module, settled.module)
    return inside or (settled.side == "output" and module_of(settled.module) == module_of(waiting.module))


def _within(module: str, other: str) -> bool:
    return module != other and (not other or module.startswith(other + "."))


def _unsummed(event: Event, relative: float, phase: str, *, last: bool = False) -> Fault:
    if phase == "forward":
        what, todo = f"its {event.side} is", f"after it: {_SUM}"
    else:
        what, todo = f"the gradient of its {event.side} is", f"where it begins: {_COPY}"
    said = f"{what} only a part on each rank, and nothing adds them up. A collective is missing {todo}"
    return Fault(event.module, phase, relative, said, unsummed=last)
