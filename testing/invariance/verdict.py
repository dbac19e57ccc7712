"""Find, in what ranks recorded of a module, the first thing that differs from one process: what to blame."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from torch import Tensor

from ...parallel_state import Layout
from ..layouts import assemble, differences, largest, zero_share
from ..recorder import Event
from .relation import Placement, place
from .run import Witnessed

T = TypeVar("T")
Order = Literal["forward", "backward"]

#: What is held and compared after the activations.
_HELD = ("gradients", "parameters")
_SUM = "reduce_from_tensor (leave_tensor under sequence parallelism), or a RowParallelLinear"
_COPY = "copy_to_tensor (enter_tensor under sequence parallelism), or a ColumnParallelLinear"


@dataclass(frozen=True)
class Fault:
    """Describe the first fault of a module in a layout.

    ``module``: the first that differs, in the order of computation; ``phase``: ``structure``, ``forward``,
    ``loss``, ``backward``, ``gradient``, ``update``. ``relative``: the difference over the largest element.
    """

    module: str
    phase: str
    relative: float
    said: str
    #: Whether the only fault so far is that partial values were not summed.
    unsummed: bool = False


@dataclass(frozen=True)
class Figures:
    """Hold the largest relative differences of one layout."""

    forward: float
    gradients: float
    weights: float


def judge(layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], *, tolerance: float) -> Fault | Figures:
    """Return the first fault, in the order of computation, or how close everything is."""
    forward = partial(first_wrong_module, order="forward")
    for check in (_structure, forward, _losses, _backward, _gradients, _updates):
        found = check(layout, one, ranks, tolerance)
        if found is not None:
            return found
    events = placements(layout, one.seen.forward, [rank.seen.forward for rank in ranks], tolerance)
    return Figures(
        max((place.relative for _, place in events), default=0.0),
        *(max((gap for _, gap in _differences(one, ranks, key)), default=0.0) for key in _HELD),
    )


def _differences(one: Witnessed, ranks: Sequence[Witnessed], key: str) -> Iterator[tuple[str, float]]:
    return differences(assemble([getattr(one.run, key)]), [getattr(rank.run, key) for rank in ranks])


def _structure(layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float) -> Fault | None:
    misfits = {name: said for rank in reversed(ranks) for name, said in rank.misfits.items()}
    there = {name for rank in ranks for name in rank.declared}
    misfits |= {name: f"{name} is on no rank" for name in one.declared if name not in there}
    for name in (*one.declared, *sorted(misfits)):  # in the module's order; last, what one process has not
        if name in misfits:
            return Fault(module_of(name), "structure", float("inf"), misfits[name])
    return None


def _backward(layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float) -> Fault | None:
    """Return the first fault of an activation's gradient.

    A gradient that stays partial to the end is no fault if every parameter's gradient is right.
    """
    found = first_wrong_module(layout, one, ranks, tolerance, "backward")
    if found is None or (found.unsummed and _gradients(layout, one, ranks, tolerance) is None):
        return None
    return found


def _losses(layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float) -> Fault | None:
    if wrong := _wrong_number("losses", 0, one, ranks, tolerance):
        off, said = wrong
        said += ", though every module's output is right: the loss function gives the sum and the count of "
        return Fault("", "loss", off, f"the loss of {said}its own samples, alike on all tensor ranks")
    return None


def _wrong_number(
    key: str, step: int, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float
) -> tuple[float, str] | None:
    """Return how far the first rank is off whose number of this step differs, and what it has."""
    wanted = getattr(one.run, key)[step]
    for rank, each in enumerate(ranks):
        value = getattr(each.run, key)[step]
        off = abs(value - wanted) / max(abs(wanted), 1e-300)
        if not off <= tolerance:
            return off, f"rank {rank} is {value:.10g}, and {wanted:.10g} on one process"
    return None


def _gradients(layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float) -> Fault | None:
    for name, relative in _differences(one, ranks, "gradients"):
        if relative <= tolerance:
            continue
        holders = [rank for rank in ranks if name in rank.run.gradients]
        if holders and name in one.run.gradients:
            said = f"the gradient of {name} differs by {relative:.1e}, though every activation's is right"
            said += _wrong_declaration(name, layout, one, ranks, tolerance)
        else:
            said = f"{name} has no gradient {'on one process' if holders else 'in the layout'}"
        return Fault(module_of(name), "gradient", relative, said)
    return None


def _wrong_declaration(
    name: str, layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float
) -> str:
    """Return the mistake of its declaration that a parameter's gradient looks like, or an empty string."""
    holders = [rank for rank in ranks if name in rank.run.gradients]
    whole, declared = one.run.gradients[name][2], holders[0].declared[name]
    for group in tensor_groups(layout, ranks):
        held = [rank.run.gradients[name] for rank in group if name in rank.run.gradients]
        if len(held) < 2 or len({box for box, _, _ in held}) > 1 or not held[0][0].size:
            continue
        found = place(whole[held[0][0].slices], [part for _, _, part in held], tolerance=tolerance)
        if found.kind == "partial":
            said = ": it is only a part on each rank, and they add up to the right one. "
            return said + 'Declare the parameter with partial=("tensor",)'
        if "too large" in found.note:
            said = f": it is {len(held)} times too large"
            if "tensor" in declared.partial:
                said += '. Each rank has all of it, so partial=("tensor",) does not belong there'
            return said
    if layout.pipeline > 1 and len(holders) > layout.first_rank(1) and not declared.ends:
        return ": more than one stage holds the parameter. Declare it with ends=True"
    return ""


def _updates(layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float) -> Fault | None:
    for step in range(len(one.run.norms)):
        for what, key in (("loss", "losses"), ("gradient norm", "norms")):
            if wrong := _wrong_number(key, step, one, ranks, tolerance):
                off, said = wrong
                said = f"the {what} of {said} in step {step + 1}, though the first gradients were right"
                return Fault("", "update", off, said)
    for name, relative in _differences(one, ranks, "parameters"):
        if not relative <= tolerance:
            said = f"{name} differs by {relative:.1e} after {len(one.run.norms)} steps; the first was right"
            return Fault(module_of(name), "update", relative, said)
    return None


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


def tensor_groups(layout: Layout, ranks: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the ranks of each tensor group; the tensor axis varies fastest."""
    for start in range(0, layout.world, layout.tensor):
        yield ranks[start : start + layout.tensor]


def module_of(name: str) -> str:
    return name.rpartition(".")[0]
