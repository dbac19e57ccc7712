"""Find the fastest layouts that fit, by a best-first search (Hart et al. 1968) over groups of layouts.

Every group of layouts has a lower bound of its time; the group with the lowest bound is opened next. A group
is first a cut of the model, then also a flow, a mode, and a store. Each of these steps makes the bound
tighter; a flow and a single layout have two bounds in turn, and a layout is timed in full at the end. What
is timed waits for its turn like the groups: if it comes first, no layout is faster. So the search finds what
timing every layout would find. What is opened is among the fastest or does not fit, so the counted reasons
are those of layouts that could have been faster.

Offload (weights on the host) is tried only if no layout fits without it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import count

from ...layers import Checkpointing
from ...parallel_state import BadInput
from ..memory import MemoryPlan
from .bound import Bound
from .candidates import Cut, Flow, Store, candidates
from .choice import Choice, recipe_of
from .evaluate import Answer, Evaluator
from .order import TIED, simplest_first
from .request import Request
from .shortage import none_fits, none_legal, shortage
from .tally import Tally

#: Layouts to show, and how many times as long as the fastest one of them may take.
SHOWN, LONGEST = 10, 3.0


@dataclass
class Found:
    """Hold the result of a search. ``best``: the fastest layout of each cut, in the order of
    ``simplest_first``; ``timed``: every layout that fits and was timed in full; ``legal``: the number of
    legal layouts.
    """

    request: Request
    best: list[Answer] = field(default_factory=list)
    timed: list[Answer] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    legal: int = 0

    @property
    def settled(self) -> int:
        """Return the number of legal layouts that do not fit, are slower, or are in ``best``."""
        return self.tally.count("memory") + self.tally.count("slower") + len(self.best)


@dataclass
class _Group:
    """State what is decided so far; what follows in this order is left open.

    ``tight``: whether the bound of a flow, or of a single layout, is the tighter one of its two, which takes
    more work.
    """

    cut: Cut
    flow: Flow | None = None
    mode: Checkpointing | None = None
    store: Store | None = None
    tight: bool = False
    answer: Answer | None = None

    @property
    def layouts(self) -> int:
        """Return the number of layouts in this group."""
        if self.flow is None:
            return self.cut.layouts
        modes = len(self.flow.modes) if self.mode is None else 1
        return modes * (len(self.cut.stores) if self.store is None else 1)

    @cached_property
    def choice(self) -> Choice:
        """Return the layout of this group; if the store is still open, with the first one."""
        assert self.flow is not None and self.mode is not None
        return self.cut.choice(self.flow, self.mode, self.store)


def find_layouts(
    request: Request, *, shown: int = SHOWN, progress: Callable[[Found], None] | None = None
) -> Found:
    """Search for the fastest layouts of a request that fit.

    ``progress``: called now and then with the result so far. Raises ``BadInput`` if no layout is legal or
    none fits; the message says what to change, with figures.
    """
    search = _Search(request, shown, progress)
    if not search.run() and not search.run(offload=True):
        raise none_fits(request, search.found.tally)
    return search.found


class _Search:
    def __init__(self, request: Request, shown: int, progress: Callable[[Found], None] | None) -> None:
        self.request, self.shown, self.progress = request, shown, progress
        self.found = Found(request)
        self.evaluator = Evaluator(request)
        self.bound = Bound(self.evaluator)
        self._heap: list[tuple[float, int, _Group]] = []
        self._number = count()
        self._shown: set[tuple[object, ...]] = set()

    def run(self, *, offload: bool = False) -> bool:
        """Search, and tell whether something fits."""
        outcome, steps = self.found, 0
        for cut in candidates(self.request, Tally() if offload else outcome.tally, offload=offload):
            outcome.legal += cut.layouts
            self._push(_Group(cut))
        if not self._heap:
            raise none_legal(self.request, outcome.tally)
        while self._heap and not self._done(self._heap[0][0]):
            _, _, group = heappop(self._heap)
            self._open(group)
            steps += 1
            if self.progress is not None and steps % 32 == 0:
                self.progress(outcome)
        self._put_in_order()
        left = sum(group.layouts for _, _, group in self._heap)
        if left:
            outcome.tally.add("slower", "than the best, by a lower bound of their time", left, "")
        return bool(outcome.best)

    def _done(self, bound: float) -> bool:
        best = self.found.best
        if not best:
            return False
        enough = 1 + TIED if len(best) >= self.shown else LONGEST
        return bound > enough * best[0].time.seconds

    def _put_in_order(self) -> None:
        ordered = simplest_first(self.found.best)
        self.found.best = ordered[: self.shown]
        if left := len(ordered) - len(self.found.best):
            self.found.tally.add("slower", "or hardly faster than simpler layouts, which are shown", left, "")

    def _push(self, group: _Group) -> None:
        try:
            bound = self._bound(group)
        except BadInput as error:  # building a layer may refuse what the config allows
            self.found.tally.illegal(error, group.layouts)
            self.found.legal -= group.layouts
            return
        heappush(self._heap, (bound, next(self._number), group))

    def _bound(self, group: _Group) -> float:
        if group.answer is not None:
            return group.answer.time.seconds
        if group.flow is None:
            return self.bound.of_cut(group.cut)
        if group.mode is None:
            bound = self.bound.of_flow if group.tight else self.bound.of_rows
            return bound(group.cut, group.flow)
        if not group.tight:
            return self.bound.of_mode(group.cut, group.flow, group.mode)
        return self.bound.of_choice(group.choice)

    def _open(self, group: _Group) -> None:
        cut, flow = group.cut, group.flow
        if group.cut.shown in self._shown:
            self.found.tally.add("slower", "than a layout of the same cut", group.layouts, "")
        elif group.answer is not None:
            self._take(group.answer)
        elif flow is None:
            for cut_flow in cut.flows:
                self._push(_Group(cut, cut_flow))
        elif not group.tight and (group.mode is None or group.store is not None):
            group.tight = True
            self._push(group)
        elif group.mode is None:
            for mode in flow.modes:
                self._push(_Group(cut, flow, mode))
        elif group.store is None:
            self._open_stores(cut, flow, group.mode)
        elif (short := self._short(group.choice)) is not None:
            self._count_memory(group.choice, *short, 1)
        else:
            self._time(group)

    def _open_stores(self, cut: Cut, flow: Flow, mode: Checkpointing) -> None:
        """Open the stores of each ZeRO stage of which the one that needs least memory fits."""
        left = list(cut.stores)
        for least in cut.least_stores:
            alike = [store for store in left if store.zero == least.zero]
            short = self._short(choice := cut.choice(flow, mode, least))
            if short is None:
                for store in alike:
                    self._push(_Group(cut, flow, mode, store))
            elif short[1].activations + short[1].pipeline + self.request.runtime > self.request.room:
                self._count_memory(choice, *short, len(left))  # no store changes it
                break
            else:
                self._count_memory(choice, *short, len(alike))
            left = [store for store in left if store.zero != least.zero]

    def _time(self, group: _Group) -> None:
        """Evaluate a layout in full, and open it again if every one of its ranks fits."""
        memory = []
        for rank in range(group.choice.layout.pipeline):
            memory.append(self.evaluator.memory(group.choice, rank))
            if memory[rank].total + self.request.runtime > self.request.room:
                self._count_memory(group.choice, rank, memory[rank], 1)
                return
        answer = self.evaluator.answer(group.choice, memory)
        self.found.timed.append(answer)
        group.answer = answer
        self._push(group)

    def _take(self, answer: Answer) -> None:
        recipe_of(self.request, answer.choice)  # every check of a recipe, once more
        self.found.best.append(answer)
        self._shown.add(answer.choice.cut)

    def _short(self, choice: Choice) -> tuple[int, MemoryPlan] | None:
        """Return the end of the pipeline, which nearly always needs most, that does not fit, with its memory;
        ``None`` if both fit.
        """
        for rank in dict.fromkeys((0, choice.layout.pipeline - 1)):
            plan = self.evaluator.memory(choice, rank)
            if plan.total + self.request.runtime > self.request.room:
                return rank, plan
        return None

    def _count_memory(self, choice: Choice, rank: int, plan: MemoryPlan, layouts: int) -> None:
        request = self.request
        largest, text = shortage(plan, choice, rank, request)
        self.found.tally.add(
            "memory", largest, layouts, text, excess=plan.total + request.runtime - request.room
        )
