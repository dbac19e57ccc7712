"""Find, in what ranks recorded of a module, the first thing that differs from one process: what to blame."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import isfinite
from typing import Literal, get_args

from torch import Tensor

from ...parallel_state import Layout
from ...system import counted
from ..layouts import assemble, differences, largest, zero_share
from ..recorder import Event
from .relation import Placement, place
from .run import Witnessed

Order = Literal["forward", "backward"]
Kind = Literal["gradients", "parameters"]
#: How many times as far from one process as its own rounding takes it may be what only rounds otherwise.
ROUNDING = 100

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
    message: str


@dataclass(frozen=True)
class Figures:
    """Hold the largest relative differences of one layout, but for those that are rounding."""

    forward: float
    gradients: float
    weights: float


@dataclass(frozen=True)
class Judge:
    """Compare what ``ranks`` saw in a layout with what one process saw, ``alone``.

    ``nudge`` runs one process again, with weights that differ in their last digit: what this changes as much
    is rounding. A gradient that is zero by its formula, as that of a key's bias, is, and AdamW divides it by
    its own size.
    """

    layout: Layout
    alone: Witnessed
    ranks: Sequence[Witnessed]
    tolerance: float
    nudge: Callable[[], Witnessed]

    def verdict(self) -> Fault | Figures:
        """Return the first fault, in the order of computation, or how close everything is."""
        fault = (
            self._structure()
            or self._first_wrong_module("forward")
            or self._losses()
            or self._first_wrong_module("backward")
            or self._gradients()
            or self._updates()
        )
        if fault is not None:
            return fault
        forward = max((placement.relative for _, placement in self._placements("forward")), default=0.0)
        kinds = (self._differences(key) for key in ("gradients", "parameters"))
        return Figures(forward, *(max((gap for _, gap in gaps), default=0.0) for gaps in kinds))

    def _differences(self, key: Kind) -> Iterator[tuple[str, float]]:
        """Yield each tensor's difference, but for one that is rounding."""
        for name, relative in _apart(key, self.alone, self.ranks):
            if relative <= self.tolerance or not relative <= ROUNDING * self._rounding[key].get(name, 0.0):
                yield name, relative

    @cached_property
    def _rounding(self) -> dict[Kind, dict[str, float]]:
        """Return how far each tensor of one process is from itself where its weights are nudged."""
        kinds, nudged = get_args(Kind), [self.nudge()]
        return {
            kind: {name: gap for name, gap in _apart(kind, self.alone, nudged) if isfinite(gap)}
            for kind in kinds
        }

    def _structure(self) -> Fault | None:
        misfits = {name: text for rank in reversed(self.ranks) for name, text in rank.misfits.items()}
        names = {name for rank in self.ranks for name in rank.declared}
        misfits |= {name: f"{name} is on no rank" for name in self.alone.declared if name not in names}
        # In the module's order; what one process has not comes last.
        for name in (*self.alone.declared, *sorted(misfits)):
            if name in misfits:
                return Fault(module_of(name), "structure", float("inf"), misfits[name])
        return None

    def _losses(self) -> Fault | None:
        if wrong := self._wrong_number("losses", 0):
            off, text = wrong
            text += self._although("every module's output is right")
            todo = "a loss gives the sum and the count of its own samples, alike on all tensor ranks"
            return Fault("", "loss", off, f"the loss of {text}: {todo}")
        return None

    def _although(self, right: str) -> str:
        """Return what was found right before, if modules were compared at all."""
        return "" if self.layout.context > 1 else f", though {right}"

    def _wrong_number(self, key: str, step: int) -> tuple[float, str] | None:
        """Return how far the first rank is off whose number of this step differs, and what it has."""
        expected = getattr(self.alone.run, key)[step]
        for rank, trial_rank in enumerate(self.ranks):
            value = getattr(trial_rank.run, key)[step]
            off = abs(value - expected) / max(abs(expected), 1e-300)
            if not off <= self.tolerance:
                return off, f"rank {rank} is {value:.10g}, and {expected:.10g} on one process"
        return None

    def _gradients(self) -> Fault | None:
        for name, relative in self._differences("gradients"):
            if relative <= self.tolerance:
                continue
            holders = [rank for rank in self.ranks if name in rank.run.gradients]
            if holders and name in self.alone.run.gradients:
                text = f"the gradient of {name} differs by {relative:.1e}"
                text += self._although("every activation's is right") + self._wrong_declaration(name, holders)
            else:
                text = f"{name} has no gradient {'on one process' if holders else 'in the layout'}"
            return Fault(module_of(name), "gradient", relative, text)
        return None

    def _wrong_declaration(self, name: str, holders: Sequence[Witnessed]) -> str:
        """Return the mistake of its declaration that a parameter's gradient looks like, or nothing."""
        whole, declared = self.alone.run.gradients[name][2], holders[0].declared[name]
        for group in self._tensor_groups():
            pieces = [rank.run.gradients[name] for rank in group if name in rank.run.gradients]
            if len(pieces) < 2 or len({box for box, _, _ in pieces}) > 1 or not pieces[0][0].size:
                continue
            parts = [part for _, _, part in pieces]
            placement = place(whole[pieces[0][0].slices], parts, tolerance=self.tolerance)
            if placement.kind == "partial":
                text = ": it is only a part on each rank, and they add up to the right one. "
                return text + 'Declare the parameter with partial=("tensor",)'
            if "too large" in placement.note:
                text = f": it is {len(pieces)} times too large"
                if "tensor" in declared.partial:
                    text += '. Each rank has all of it, so partial=("tensor",) does not belong there'
                return text
        return ""

    def _updates(self) -> Fault | None:
        steps = len(self.alone.run.norms)
        for step, (what, key) in product(range(steps), (("loss", "losses"), ("gradient norm", "norms"))):
            if wrong := self._wrong_number(key, step):
                off, text = wrong
                text = f"the {what} of {text} in step {step + 1}, though the first gradients were right"
                return Fault("", "update", off, text)
        for name, relative in self._differences("parameters"):
            if not relative <= self.tolerance:
                text = f"{name} differs by {relative:.1e} after {counted(steps, 'step')}; the first was right"
                return Fault(module_of(name), "update", relative, text)
        return None

    def _first_wrong_module(self, order: Order) -> Fault | None:
        """Return the first module whose activation, or for ``backward`` its gradient, differs, or whose
        partial values nothing sums.
        """
        waiting: list[Event] = []  # partial values that nothing has summed so far
        for event, placement in self._placements(order):
            if placement.kind == "partial":
                waiting.append(event)
            elif placement.settled:
                waiting = [rank for rank in waiting if not _sums(event, rank, order)]
            elif waiting:
                return _unsummed(waiting[0], placement.relative, order)
            else:
                return _differs(
                    event, placement, order, {rank.module for rank in getattr(self.alone.seen, order)}
                )
        if not waiting:
            return None
        # A gradient that stays partial to the end is no fault if every parameter's gradient is right.
        wrong = waiting[-1].module == "" if order == "forward" else self._gradients() is not None
        return _unsummed(waiting[0], 1.0, order) if wrong else None

    def _placements(self, order: Order) -> Iterator[tuple[Event, Placement]]:
        """Yield each event of the one process, in order, and how the tensor ranks that saw it hold it.

        A rank numbers its own calls of a module, and one process all. So what several pipeline ranks call is
        left out: it is compared by what other modules are given and give, and by its gradients. So is what
        context ranks call, each with its chunks of a row.
        """
        if self.layout.context > 1:
            return
        alone: dict[Event, Tensor] = getattr(self.alone.seen, order)
        floats = [x for x in alone.values() if x.is_floating_point()]
        least = max((zero_share(x.dtype) * largest(x) for x in floats), default=0.0)
        callers: dict[str, set[int]] = {}
        for rank, trial_rank in enumerate(self.ranks):
            for event in getattr(trial_rank.seen, order):
                callers.setdefault(event.module, set()).add(self.layout.coordinates(rank).pipeline)
        for event, whole in alone.items():
            for group in self._tensor_groups() if len(callers.get(event.module, ())) < 2 else ():
                orders = [getattr(rank.seen, order) for rank in group]
                parts = [rank[event] for rank in orders if event in rank]
                if len(parts) == len(group):
                    yield event, place(whole, parts, tolerance=self.tolerance, least=max(least, 1e-300))

    def _tensor_groups(self) -> Iterator[Sequence[Witnessed]]:
        """Yield the ranks of each tensor group; the tensor axis varies fastest."""
        for start in range(0, self.layout.world, self.layout.tensor):
            yield self.ranks[start : start + self.layout.tensor]


def _apart(key: Kind, alone: Witnessed, ranks: Sequence[Witnessed]) -> Iterator[tuple[str, float]]:
    return differences(assemble([getattr(alone.run, key)]), [getattr(rank.run, key) for rank in ranks])


def _differs(event: Event, placement: Placement, order: Order, called: Collection[str]) -> Fault:
    module = event.module
    if order == "backward":
        text = f"the gradient of its {event.side} differs"
    elif event.side == "input":
        # By the module whose forward calls this one: lists and dicts of modules have no forward.
        above = (module.rsplit(".", count)[0] for count in range(1, module.count(".") + 1))
        module = next((name for name in above if name in called), "")
        text = f"what it gives to {event.module} differs"
    else:
        text = "its output differs"
    note = f": {placement.note}" if placement.note else ""
    return Fault(module, order, placement.relative, f"{text} by {placement.relative:.1e}{note}")


def _sums(settled: Event, waiting: Event, order: Order) -> bool:
    """Return whether a partial value must have been summed where another event has a whole one.

    It has if the module around it gives a whole output, or its caller goes on with a whole input; in the
    backward, which runs the other way, outputs are what inputs are in the forward.
    """
    if settled.side == ("output" if order == "forward" else "input"):
        around = settled.module + "." if settled.module else ""
        return waiting.module != settled.module and waiting.module.startswith(around)
    return module_of(settled.module) == module_of(waiting.module)


def _unsummed(event: Event, relative: float, order: Order) -> Fault:
    if order == "forward":
        what, todo = f"its {event.side} is", f"after it: {_SUM}"
    else:
        what, todo = f"the gradient of its {event.side} is", f"where it begins: {_COPY}"
    text = f"{what} only a part on each rank, and nothing adds them up. A collective is missing {todo}"
    return Fault(event.module, order, relative, text)


def module_of(name: str) -> str:
    return name.rpartition(".")[0]
