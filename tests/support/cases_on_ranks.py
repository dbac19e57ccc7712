"""Define ``CasesOnRanks``: run a function for many cases on ranks, several of them in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from trilith.parallel_state import Layout
from trilith.ranks.pool import run_parallel


class _HasLayout(Protocol):
    @property
    def layout(self) -> Layout: ...


CaseT = TypeVar("CaseT", bound=_HasLayout)
ResultT = TypeVar("ResultT")


class CasesOnRanks(Generic[CaseT, ResultT]):
    """Give what each rank returns for a case, by rank.

    ``function`` takes cases and returns a result for each, on every rank of their layout. A call runs the
    case that is asked for and up to ``at_once`` - 1 of the cases after it whose layouts have as many ranks,
    because a call takes longer to begin than a case; their results are kept. ``timeout``: seconds of a call.
    """

    def __init__(
        self,
        function: Callable[[Sequence[CaseT]], Sequence[ResultT]],
        cases: Sequence[CaseT],
        *,
        at_once: int,
        timeout: float,
    ) -> None:
        self.function, self.cases, self.at_once, self.timeout = function, cases, at_once, timeout
        self._known: dict[int, list[ResultT]] = {}

    def __getitem__(self, number: int) -> list[ResultT]:
        """Return the results of the case with this number, by rank."""
        if number not in self._known:
            world = self.cases[number].layout.world
            alike = [place for place, one in enumerate(self.cases) if one.layout.world == world]
            some = [place for place in alike if place >= number][: self.at_once]
            todo = [self.cases[place] for place in some]
            ranks = run_parallel(self.function, world, todo, timeout=self.timeout)
            self._known |= {place: [rank[i] for rank in ranks] for i, place in enumerate(some)}
        return self._known[number]
