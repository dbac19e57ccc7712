"""Find the fastest layouts that fit, by a best-first search over groups of layouts (``groups.py``).

Every group of layouts has a lower bound of its time; the group with the lowest bound is opened next. So the
search finds what timing every layout would find. What is opened is among the fastest or does not fit, so the
counted reasons are those of layouts that could have been faster. Several processes may open groups; the
results are taken in the order of the bounds, as one process would open them.

Offload (weights on the host of a GPU) is tried only if no layout fits without it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import merge
from itertools import count
from operator import attrgetter

from ...parallel_state import BadInput
from .candidates import candidates
from .choice import Reason, Tally
from .evaluate import Answer
from .groups import Opened, opened_groups
from .request import Request
from .shortage import none_fits, none_legal

#: Layouts to show, and how many times as long as the fastest one of them may take.
SHOWN, LONGEST = 10, 3.0
#: Layouts whose seconds differ by less are not told apart: predictions differ from measured steps by more.
TIED = 0.05


@dataclass
class Found:
    """Hold the result of a search. ``best``: the fastest layout of each cut, in the order of
    ``simplest_first``; ``timed``: every layout that fits and was timed in full; ``legal``: the number of
    legal layouts. ``error``: why a search found nothing, of one among several.
    """

    request: Request
    best: list[Answer] = field(default_factory=list)
    timed: list[Answer] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    legal: int = 0
    error: BadInput | None = None

    @property
    def settled(self) -> int:
        """Return the number of legal layouts that do not fit, are slower, or are in ``best``."""
        return self.tally.count("memory") + self.tally.count("slower") + len(self.best)

    def add(self, opened: Opened) -> None:
        """Take what opening a group of layouts showed."""
        self.tally.include(opened.tally)
        self.legal -= opened.tally.count("not legal")  # which a layer refuses, not the config
        self.timed += [] if opened.timed is None else [opened.timed]
        self.best += [] if opened.fastest is None else [opened.fastest]


def simplest_first(answers: Iterable[Answer]) -> list[Answer]:
    """Return the layouts by their seconds, but those that are tied with the fastest one, then those that are
    tied with the fastest one of the rest, and so on, by what they need.
    """
    ordered, unordered = list[Answer](), sorted(answers, key=lambda answer: answer.time.seconds)
    while unordered:
        tied = [answer for answer in unordered if ties(answer, unordered[0])]
        ordered += sorted(tied, key=lambda answer: (*answer.choice.needs, answer.time.seconds))
        unordered = unordered[len(tied) :]
    return ordered


def ties(answer: Answer, fastest: Answer) -> bool:
    """Tell whether a layout's seconds are too close to those of a faster one to tell them apart."""
    return answer.time.seconds <= (1 + TIED) * fastest.time.seconds


def find_layouts(
    request: Request,
    *,
    shown: int = SHOWN,
    processes: int = 1,
    progress: Callable[[Found], None] | None = None,
) -> Found:
    """Search for the fastest layouts of a request that fit.

    ``processes``: those that share a search of many layouts, forked from this one, so that nothing here may
    use a GPU or hold a process group. ``progress``: called now and then with the result so far. Raises
    ``BadInput`` if no layout is legal or none fits; the message says what to change, with figures.
    """
    outcome = Found(request)
    for offload in request.offloads:
        if _search(outcome, shown, processes, progress, offload=offload):
            return outcome
    raise none_fits(request, outcome.tally)


def _search(
    outcome: Found, shown: int, processes: int, progress: Callable[[Found], None] | None, *, offload: bool
) -> bool:
    request, legal = outcome.request, outcome.legal
    cuts = [*candidates(request, Tally() if offload else outcome.tally, offload=offload)]
    outcome.legal += sum(cut.layouts for cut in cuts)
    with opened_groups(request, cuts, processes) as streams:
        for steps, opened in zip(count(1), merge(*streams, key=attrgetter("bound"))):
            if outcome.best and opened.bound > _longest(outcome.best, shown):
                break
            outcome.add(opened)
            if progress is not None and steps % 32 == 0:
                progress(outcome)
    if outcome.legal == legal:
        raise none_legal(request, outcome.tally)
    slower = outcome.legal - outcome.settled
    ordered = simplest_first(outcome.best)
    outcome.best = ordered[:shown]
    for text, layouts in (
        ("or hardly faster than simpler layouts, which are shown", len(ordered[shown:])),
        ("than the best, by a lower bound of their time", slower),
    ):
        if layouts:
            outcome.tally.add(Reason("slower", text, layouts, ""))
    return bool(outcome.best)


def _longest(best: list[Answer], shown: int) -> float:
    """Return the seconds of a step beyond which no layout is looked for."""
    return (1 + TIED if len(best) >= shown else LONGEST) * best[0].time.seconds
