"""Find, in what ranks recorded of a module, the first thing that differs from one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ...parallel_state import Layout
from ..layouts import assemble, differences
from .finding import Fault, Figures, module_of, tensor_groups
from .first_difference import first_wrong_module, placements
from .relation import place
from .run import Witnessed

#: What is held and compared after the activations.
_HELD = ("gradients", "parameters")


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
    names = {name for rank in ranks for name in rank.shapes}
    for name, shape in one.shapes.items():
        for rank in ranks:
            module = module_of(name)
            if name in rank.misfits:
                return Fault(module, "structure", float("inf"), f"{name} is {rank.misfits[name]}")
            here = rank.shapes.get(name, shape)
            if here == shape:
                continue
            said = f"{name} is {here}, and {shape} on one process"
            if name in rank.undeclared:
                dim = next((d for d, (a, b) in enumerate(zip(here, shape, strict=False)) if a != b), 0)
                said += (
                    ", and nobody declared it: a parameter that is cut says so, by "
                    f"declare(module, name, cut=Cut({dim}), state=state) or when declare_parameter makes it; "
                    "parallel layers do it by themselves"
                )
            return Fault(module, "structure", float("inf"), said)
        if name not in names:
            return Fault(module_of(name), "structure", float("inf"), f"{name} is on no rank")
    for name in sorted(names - set(one.shapes)):
        return Fault(module_of(name), "structure", float("inf"), f"{name} is not there on one process")
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
    for rank, each in enumerate(ranks):
        wanted, loss = one.run.losses[0], each.run.losses[0]
        off = abs(loss - wanted) / max(abs(wanted), 1e-300)
        if not off <= tolerance:
            said = (
                f"the loss of rank {rank} is {loss:.10g}, and {wanted:.10g} on one process, though every "
                "module's output is right: the loss function gives the sum and the count of its own "
                "samples, alike on all tensor ranks"
            )
            return Fault("", "loss", off, said)
    return None


def _gradients(layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float) -> Fault | None:
    for name, relative in _differences(one, ranks, "gradients"):
        if relative <= tolerance:
            continue
        module = module_of(name)
        holders = [rank for rank in ranks if name in rank.run.gradients]
        if not holders or name not in one.run.gradients:
            where = "on one process" if holders else "in the layout"
            return Fault(module, "gradient", relative, f"{name} has no gradient {where}")
        whole, declared = one.run.gradients[name][2], holders[0].declared[name]
        said = f"the gradient of {name} differs by {relative:.1e}, though every activation's is right"
        for group in tensor_groups(layout, ranks):
            held = [rank.run.gradients[name] for rank in group if name in rank.run.gradients]
            if len(held) < 2 or len({box for box, _, _ in held}) > 1 or not held[0][0].size:
                continue
            parts = [part for _, _, part in held]
            found = place(whole[held[0][0].slices], parts, tolerance=tolerance)
            if found.kind == "partial":
                said += (
                    ": it is only a part on each rank, and they add up to the right one. Declare the "
                    'parameter with partial=("tensor",)'
                )
                return Fault(module, "gradient", relative, said)
            if "too large" in found.note:
                said += f": it is {len(parts)} times too large"
                if "tensor" in declared.partial:
                    said += '. Each rank has all of it, so partial=("tensor",) does not belong there'
                return Fault(module, "gradient", relative, said)
        if layout.pipeline > 1 and len(holders) > layout.first_rank(1) and not declared.ends:
            said += ": more than one stage holds the parameter. Declare it with ends=True"
        return Fault(module, "gradient", relative, said)
    return None


def _updates(layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float) -> Fault | None:
    for step in range(len(one.run.norms)):
        for what, key in (("loss", "losses"), ("gradient norm", "norms")):
            wanted, *each = (getattr(seen.run, key)[step] for seen in (one, *ranks))
            for rank, value in enumerate(each):
                off = abs(value - wanted) / max(abs(wanted), 1e-300)
                if not off <= tolerance:
                    said = f"the {what} of step {step + 1} is {value:.10g} on rank {rank}, and {wanted:.10g} "
                    said += "on one process, though the first gradients were right"
                    return Fault("", "update", off, said)
    for name, relative in _differences(one, ranks, "parameters"):
        if not relative <= tolerance:
            said = f"{name} differs by {relative:.1e} after {len(one.run.norms)} steps; the first was right"
            return Fault(module_of(name), "update", relative, said)
    return None
