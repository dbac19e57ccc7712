"""Find, in what ranks recorded of a module, the first thing that differs from one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...parallel_state import Layout
from .finding import Fault, Figures, module_of, tensor_groups
from .first_difference import first_backward, first_forward, placements
from .relation import Placement, place
from .run import Held, Witnessed


def judge(layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], *, tolerance: float) -> Fault | Figures:
    """Return the first fault, in the order of computation, or how close everything is."""
    for check in (_structure, first_forward, _losses, _backward, _gradients, _updates):
        found = check(layout, one, ranks, tolerance)
        if found is not None:
            return found
    worst = [max((p.relative for p in places), default=0.0) for places in _all(layout, one, ranks, tolerance)]
    return Figures(*worst)


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
    found = first_backward(layout, one, ranks, tolerance)
    if found is None or (found.unsummed and _gradients(layout, one, ranks, tolerance) is None):
        return None
    return found


def _losses(layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float) -> Fault | None:
    for rank, each in enumerate(ranks):
        off = abs(each.losses[0] - one.losses[0]) / max(abs(one.losses[0]), 1e-300)
        if not off <= tolerance:
            said = (
                f"the loss of rank {rank} is {each.losses[0]:.10g}, and {one.losses[0]:.10g} on one process, "
                "though every module's output is right: the loss function gives the sum and the count of its "
                "own samples, alike on all tensor ranks"
            )
            return Fault("", "loss", off, said)
    return None


def _gradients(layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float) -> Fault | None:
    for name, relative in _differences(one.gradients, [r.gradients for r in ranks], tolerance):
        if relative <= tolerance:
            continue
        whole, module = one.gradients[name][1], module_of(name)
        said = f"the gradient of {name} differs by {relative:.1e}, though every activation's is right"
        first = next(r for r in ranks if name in r.gradients)
        for group in tensor_groups(layout, ranks):
            held = [r.gradients[name] for r in group if name in r.gradients]
            if len(held) < 2 or len({box for box, _ in held}) > 1 or not held[0][0].size:
                continue
            want, parts = whole[held[0][0].slices], [part for _, part in held]
            if place(want, parts, tolerance=tolerance).kind == "partial":
                said += (
                    ": it is only a part on each rank, and they add up to the right one. Declare the "
                    'parameter with partial=("tensor",)'
                )
                return Fault(module, "gradient", relative, said)
            if place(want * len(parts), parts, tolerance=tolerance).kind == "whole":
                said += f": it is {len(parts)} times too large"
                if "tensor" in first.declared[name].partial:
                    said += '. Each rank has all of it, so partial=("tensor",) does not belong there'
                return Fault(module, "gradient", relative, said)
        stages = {i for i, r in enumerate(ranks) if name in r.gradients}
        if layout.pipeline > 1 and len(stages) > layout.first_rank(1) and not first.declared[name].ends:
            said += ": more than one stage holds the parameter. Declare it with ends=True"
        return Fault(module, "gradient", relative, said)
    return None


def _updates(layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float) -> Fault | None:
    for step, norm in enumerate(one.norms):
        for what, mine, theirs in (("loss", "losses", one.losses[step]), ("gradient norm", "norms", norm)):
            for rank, each in enumerate(ranks):
                off = abs(getattr(each, mine)[step] - theirs) / max(abs(theirs), 1e-300)
                if not off <= tolerance:
                    said = f"the {what} of step {step + 1} is {getattr(each, mine)[step]:.10g} on rank {rank}"
                    said += f", and {theirs:.10g} on one process, though the first gradients were right"
                    return Fault("", "update", off, said)
    for name, relative in _differences(one.weights, [r.weights for r in ranks], tolerance):
        if not relative <= tolerance:
            said = f"{name} differs by {relative:.1e} after {len(one.norms)} steps; the first was right"
            return Fault(module_of(name), "update", relative, said)
    return None


def _all(
    layout: Layout, one: Witnessed, ranks: Sequence[Witnessed], tolerance: float
) -> Iterator[list[Placement]]:
    yield [p for _, p in placements(layout, one.seen.forward, [r.seen.forward for r in ranks], tolerance)]
    for whole, held in (
        (one.gradients, [r.gradients for r in ranks]),
        (one.weights, [r.weights for r in ranks]),
    ):
        yield [Placement("whole", relative) for _, relative in _differences(whole, held, tolerance)]


def _differences(one: Held, ranks: Sequence[Held], tolerance: float) -> Iterator[tuple[str, float]]:
    """Yield each parameter, from the last to the first, with the largest relative difference on any rank.

    A gradient that is zero but for rounding (a key's bias) is measured against the largest of all.
    """
    largest = max((float(whole.abs().max()) for _, whole in one.values() if whole.numel()), default=0.0)
    for name, (_, whole) in reversed(one.items()):
        scale = max(float(whole.abs().max()) if whole.numel() else 0.0, 1e-6 * largest, 1e-300)
        gaps = [0.0]
        for rank in ranks:
            if name in rank and (box := rank[name][0]).size:
                gaps.append(float((whole[box.slices] - rank[name][1]).abs().max()))
        yield name, float(torch.tensor(gaps).nan_to_num(nan=float("inf")).max()) / scale
