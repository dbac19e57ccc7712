"""Open groups of layouts, the one with the lowest bound of its time first (Hart et al. 1968).

A group is first a cut of the model with a flow, then also a mode with a ZeRO stage, then one layout. Each of
these steps makes the bound tighter; a flow has two bounds in turn, and a layout is timed in full at the end.
What is timed waits for its turn like the groups: if it comes first, no layout is faster.
"""

import fcntl
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, count, islice
from math import inf
from multiprocessing.connection import Connection
from typing import Any

from ...layers import Checkpointing
from ...parallel_state import BadInput
from ..memory import MemoryPlan
from .candidates import Cut, Flow, Store
from .choice import Choice, Reason, Tally, recipe_of
from .evaluate import Answer, Evaluator
from .request import Request
from .shortage import shortage

#: Cuts for which another process is worth its start, and groups whose opening it sends at once.
_CUTS_OF_PROCESS, _SENT_AT_ONCE = 32, 32


@dataclass
class Opened:
    """State what opening a group with this ``bound`` shows: layouts that are left out; one that fits and was
    ``timed`` in full; and the ``fastest`` one of its cut.
    """

    bound: float
    tally: Tally = field(default_factory=Tally)
    timed: Answer | None = None
    fastest: Answer | None = None


class Groups:
    """Open the groups of layouts of some cuts."""

    def __init__(self, request: Request) -> None:
        self.request, self.evaluator = request, Evaluator(request)
        #: Groups of layouts: a bound, a number, how many they are, what opens them, and what is decided.
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = count()
        self._shown: set[tuple[object, ...]] = set()
        self._opened = Opened(-inf)

    def opened(self, cuts: Sequence[Cut]) -> Iterator[Opened]:
        """Yield what opening each group shows, first of all what bounding the cuts does."""
        for cut in cuts:
            for flow in cut.flows:
                self._push(cut.layouts_of(flow), self.evaluator.least_of_rows, self._open_rows, cut, flow)
        yield self._opened
        while self._heap:
            bound, _, layouts, open_group, (cut, *decided) = heappop(self._heap)
            self._opened = Opened(bound)
            if cut.shown in self._shown:
                self._opened.tally.add(Reason("slower", "than a layout of the same cut", layouts, ""))
            else:
                open_group(cut, *decided)
            yield self._opened

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
            self._opened.tally.illegal(error, layouts)
            return
        heappush(self._heap, (bound, next(self._number), layouts, open_group, (cut, *decided)))

    def _open_rows(self, cut: Cut, flow: Flow) -> None:
        """Let a flow wait once more, by the tighter one of its two bounds, which takes more work."""
        self._push(cut.layouts_of(flow), self.evaluator.least_of_flow, self._open_flow, cut, flow)

    def _open_flow(self, cut: Cut, flow: Flow) -> None:
        least = self.evaluator.least_of_stores
        for mode in flow.modes:
            for stores in cut.stores_by_zero:
                self._push(len(stores), least, self._open_stores, cut, flow, mode, stores)

    def _open_stores(self, cut: Cut, flow: Flow, mode: Checkpointing, stores: Sequence[Store]) -> None:
        """Open the stores of a ZeRO stage, if the one that needs least memory fits."""
        if (short := self._short(choice := cut.choice(flow, mode, stores[0]))) is not None:
            self._count_memory(choice, *short, len(stores))
            return
        for store in stores:
            choice = cut.choice(flow, mode, store)
            self._push(1, lambda _, choice: self.evaluator.least(choice), self._time, cut, choice)

    def _time(self, cut: Cut, choice: Choice) -> None:
        """Evaluate a layout in full, and let it wait again if every one of its ranks fits."""
        if (short := self._short(choice, whole=True)) is not None:
            self._count_memory(choice, *short, 1)
            return
        answer = self._opened.timed = self.evaluator.answer(choice)
        self._push(1, lambda _, answer: answer.time.seconds, self._take, cut, answer)

    def _take(self, cut: Cut, answer: Answer) -> None:
        recipe_of(self.request, answer.choice)  # every check of a recipe, once more
        self._opened.fastest = answer
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
        self._opened.tally.add(Reason("memory", kind, layouts, text, excess))


@contextmanager
def opened_groups(request: Request, cuts: Sequence[Cut], processes: int) -> Iterator[list[Iterator[Opened]]]:
    """Open the groups of the cuts in up to ``processes`` processes, and yield an iterator over the results of
    each. The processes run ahead of who iterates, and end with the block.

    Cuts of which one is shown, and cuts whose blocks are traced once for all of them, go to one process, so
    that no result depends on another process.
    """
    by_axes: dict[object, list[Cut]] = {}
    for cut in cuts:
        axes = cut.layout
        by_axes.setdefault((axes.tensor, axes.context, axes.expert), []).append(cut)
    number = min(processes, len(cuts) // _CUTS_OF_PROCESS, len(by_axes))
    if number < 2 or sys.platform != "linux":  # elsewhere a library may not survive a fork
        yield [Groups(request).opened(cuts)]
        return
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(number)]
    shares = [[*chain(*[*by_axes.values()][first::number])] for first in range(number)]
    children = [
        context.Process(target=_send, args=(request, share, sender, pipes), daemon=True)
        for share, (_, sender) in zip(shares, pipes, strict=True)
    ]
    try:
        for child, (_, sender) in zip(children, pipes, strict=True):
            with suppress(OSError):  # room to run ahead: the results of a process may have to wait
                fcntl.fcntl(sender, fcntl.F_SETPIPE_SZ, 1 << 20)
            child.start()
        for _, sender in pipes:
            sender.close()
        yield [_received(receiver) for receiver, _ in pipes]
    finally:
        for child in children:
            child.kill()
            child.join()
        for receiver, _ in pipes:
            receiver.close()


def _send(
    request: Request, cuts: Sequence[Cut], sender: Connection, pipes: Sequence[tuple[Connection, Connection]]
) -> None:
    """Send what opening groups shows, several at once, or the error that ends it. Nothing else of the parent
    is touched: its locks may be held by threads that are not here.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for receiver, other in pipes:  # so that a send fails once the parent is gone
        receiver.close()
        if other is not sender:
            other.close()
    opened = Groups(request).opened(cuts)
    try:
        while part := [*islice(opened, _SENT_AT_ONCE)]:
            sender.send(part)
        sender.send([])
    except OSError:
        pass
    except Exception as error:
        sender.send(error)
    finally:
        os._exit(0)


def _received(receiver: Connection) -> Iterator[Opened]:
    while part := receiver.recv():
        if isinstance(part, Exception):
            raise part
        yield from part
