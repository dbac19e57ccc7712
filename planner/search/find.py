"""Find the fastest layouts that fit, by a best-first search (Hart et al. 1968) over groups of layouts.

Every group of layouts has a lower bound of its time; the group with the lowest bound is opened next. A group
is first a cut of the model, then also a flow, then a mode with a ZeRO stage, and a store. Each of these steps
makes the bound tighter; a flow and a store have two bounds in turn, and a layout is timed in full at the end.
What is timed waits for its turn like the groups: if it comes first, no layout is faster. So the search finds
what timing every layout would find. What is opened is among the fastest or does not fit, so the counted
reasons are those of layouts that could have been faster.

Offload (weights on the host) is tried only if no layout fits without it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from ...layers import Checkpointing
from ...parallel_state import BadInput
from ..memory import MemoryPlan
from .candidates import Cut, Flow, Store, candidates
from .choice import Choice, recipe_of
from .evaluate import Answer, Evaluator
from .request import Request
from .shortage import none_fits, none_legal, shortage
from .tally import Tally

#: Layouts to show, and how many times as long as the fastest one of them may take.
SHOWN, LONGEST = 10, 3.0
#: Layouts whose seconds differ by less are not told apart: predictions differ from measured steps by more.
TIED = 0.05


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


def simplest_first(answers: Iterable[Answer]) -> list[Answer]:
    """Return the layouts by their seconds, but those that are tied with the fastest one, then those that are
    tied with the fastest one of the rest, and so on, by what they need.
    """
    ordered, left = list[Answer](), sorted(answers, key=lambda answer: answer.time.seconds)
    while left:
        tied = [answer for answer in left if ties(answer, left[0])]
        ordered += sorted(tied, key=lambda answer: (*answer.choice.needs, answer.time.seconds))
        left = left[len(tied) :]
    return ordered


def ties(answer: Answer, fastest: Answer) -> bool:
    """Tell whether a layout's seconds are too close to those of a faster one to tell them apart."""
    return answer.time.seconds <= (1 + TIED) * fastest.time.seconds


def find_layouts(
    request: Request, *, shown: int = SHOWN, progress: Callable[[Found], None] | None = None
) -> Found:
    """Search for the fastest layouts of a request that fit.

    ``progress``: called now and then with the result so far. Raises ``BadInput`` if no layout is legal or
    none fits; the message says what to change, with figures.
    """
    search = _Search(request, shown, progress)
    if not search.run() and not search.run(offload=True):
        raise none_fits(request, search.outcome.tally)
    return search.outcome


class _Search:
    def __init__(self, request: Request, shown: int, progress: Callable[[Found], None] | None) -> None:
        self.request, self.shown, self.progress = request, shown, progress
        self.outcome, self.evaluator = Found(request), Evaluator(request)
        #: Groups of layouts: a bound, a number, how many they are, what opens them, and what is decided.
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = count()
        self._shown: set[tuple[object, ...]] = set()

    def run(self, *, offload: bool = False) -> bool:
        """Search, and tell whether something fits."""
        outcome = self.outcome
        for cut in candidates(self.request, Tally() if offload else outcome.tally, offload=offload):
            outcome.legal += cut.layouts
            self._push(cut.layouts, self.evaluator.least_of_cut, self._open_cut, cut)
        if not self._heap:
            raise none_legal(self.request, outcome.tally)
        for steps in count(1):
            if not self._heap or self._done(self._heap[0][0]):
                break
            _, _, layouts, open_group, (cut, *decided) = heappop(self._heap)
            if cut.shown in self._shown:
                self._slower("than a layout of the same cut", layouts)
            else:
                open_group(cut, *decided)
            if self.progress is not None and steps % 32 == 0:
                self.progress(outcome)
        ordered = simplest_first(outcome.best)
        outcome.best, others = ordered[: self.shown], len(ordered[self.shown :])
        self._slower("or hardly faster than simpler layouts, which are shown", others)
        left = sum(layouts for _, _, layouts, *_ in self._heap)
        self._slower("than the best, by a lower bound of their time", left)
        return bool(outcome.best)

    def _done(self, bound: float) -> bool:
        if not (best := self.outcome.best):
            return False
        enough = 1 + TIED if len(best) >= self.shown else LONGEST
        return bound > enough * best[0].time.seconds

    def _push(
        self,
        layouts: int,
        least: Callable[..., float],
        open_group: Callable[..., None],
        cut: Cut,
        *decided: Any,
    ) -> None:
        """Let a group wait for its turn. ``least`` bounds its time, from the cut and what else is decided."""
        try:
            bound = least(cut, *decided)
        except BadInput as error:  # building a layer may refuse what the config allows
            self.outcome.tally.illegal(error, layouts)
            self.outcome.legal -= layouts
            return
        heappush(self._heap, (bound, next(self._number), layouts, open_group, (cut, *decided)))

    def _open_cut(self, cut: Cut) -> None:
        for flow in cut.flows:
            self._push(cut.layouts_of(flow), self.evaluator.least_of_rows, self._open_rows, cut, flow)

    def _open_rows(self, cut: Cut, flow: Flow) -> None:
        """Let a flow wait once more, by the tighter one of its two bounds, which takes more work."""
        self._push(cut.layouts_of(flow), self.evaluator.least_of_flow, self._open_flow, cut, flow)

    def _open_flow(self, cut: Cut, flow: Flow) -> None:
        for mode in flow.modes:
            for stores in cut.stores_by_zero:
                self._push_stores(cut, flow, mode, stores)

    def _push_stores(self, cut: Cut, flow: Flow, mode: Checkpointing, stores: Sequence[Store]) -> None:
        least = self.evaluator.least_of_stores
        self._push(len(stores), least, self._open_stores, cut, flow, mode, stores)

    def _open_stores(self, cut: Cut, flow: Flow, mode: Checkpointing, stores: Sequence[Store]) -> None:
        """Open the stores of a ZeRO stage, if the one that needs least memory fits, or a single one."""
        choice = cut.choice(flow, mode, stores[0])
        if len(stores) == 1:
            self._push(1, lambda _, choice: self.evaluator.least(choice), self._time, cut, choice)
        elif (short := self._short(choice)) is not None:
            self._count_memory(choice, *short, len(stores))
        else:
            for store in stores:
                self._push_stores(cut, flow, mode, (store,))

    def _time(self, cut: Cut, choice: Choice) -> None:
        """Evaluate a layout in full, and let it wait again if every one of its ranks fits."""
        if (short := self._short(choice, whole=True)) is not None:
            self._count_memory(choice, *short, 1)
            return
        answer = self.evaluator.answer(choice)
        self.outcome.timed.append(answer)
        self._push(1, lambda _, answer: answer.time.seconds, self._take, cut, answer)

    def _take(self, cut: Cut, answer: Answer) -> None:
        recipe_of(self.request, answer.choice)  # every check of a recipe, once more
        self.outcome.best.append(answer)
        self._shown.add(cut.shown)

    def _short(self, choice: Choice, *, whole: bool = False) -> tuple[int, MemoryPlan] | None:
        """Return the first pipeline rank that does not fit, with its memory; ``None`` if all fit.

        The ends, which nearly always need most, come first, and are all that is asked unless ``whole``.
        """
        ranks = range(choice.layout.pipeline)
        for rank in dict.fromkeys((ranks[0], ranks[-1], *(ranks if whole else ()))):
            plan = self.evaluator.memory(choice, rank)
            if plan.total + self.request.runtime > self.request.room:
                return rank, plan
        return None

    def _count_memory(self, choice: Choice, rank: int, plan: MemoryPlan, layouts: int) -> None:
        kind, text = shortage(plan, choice, rank, self.request)
        excess = plan.total + self.request.runtime - self.request.room
        self.outcome.tally.add("memory", kind, layouts, text, excess=excess)

    def _slower(self, than: str, layouts: int) -> None:
        if layouts:
            self.outcome.tally.add("slower", than, layouts, "")
