"""Measure the link between each two nodes: whether it is there, its rate, its latency, and their clocks."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Seconds after which a link counts as broken.
_BROKEN = timedelta(seconds=10)
#: Messages that go to and fro for the latency and for the rate, and seconds that the rate is measured for.
_PINGS, _MESSAGES, _SECONDS = 20, 3, 0.2
_LEAST, _MOST = 1 << 20, 64 << 20


@dataclass(frozen=True, slots=True)
class Link:
    """Hold the link of two nodes, by their numbers: bytes a second, seconds of a message one way, and how far
    the second clock is ahead; or what went wrong.
    """

    first: int
    second: int
    rate: float = 0.0
    latency: float = 0.0
    ahead: float = 0.0
    error: str = ""


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs of the numbers below ``count``: each two meet once, nobody is in two pairs of a
    round.

    The circle method of tournaments: the first stays, the others move on by one place.
    """
    seats: list[int] = [*range(count + count % 2)]
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        seats.insert(1, seats.pop())


def measure_links(store: dist.Store, own_number: int, count: int) -> list[Link]:
    """Measure every link of ``count`` nodes, called on each; return those of which this node is the first."""
    links = []
    for number, pairs in enumerate(rounds(count)):
        _meet(store, f"round/{number}", count)
        for first, second in pairs:
            if own_number in (first, second):
                link = _measure(dist.PrefixStore(f"link/{first}/{second}", store), first, second, own_number)
                links += [link] if own_number == first else []
    return links


def _meet(store: dist.Store, name: str, count: int) -> None:
    """Wait for the others, so that no link is measured while one of its ends still measures another.

    A node that comes too late has a broken link; the rest go on without it.
    """
    if store.add(name, 1) == count:
        store.set(f"{name}/all", "")
    with suppress(RuntimeError):
        store.wait([f"{name}/all"], 2 * _BROKEN)


def _measure(store: dist.Store, first: int, second: int, own_number: int) -> Link:
    """Measure one link from both of its ends; the first end has the result."""
    me = int(own_number == second)
    try:
        group = dist.ProcessGroupGloo(store, me, 2, _BROKEN)
        latency, ahead = _ping(group, me)
        return Link(first, second, _rate(group, me), latency, ahead)
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        return Link(first, second, error=text if len(text) <= 200 else f"{text[:200]}…")


def _ping(group: Any, me: int) -> tuple[float, float]:
    """Return the seconds of a message one way and the lead of the second's clock, by the fastest one."""
    best, ahead = float("inf"), 0.0
    clock = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        if me == 1:
            _receive(group, clock, 0)
            clock[0] = time.time()
            _send(group, clock, 0)
            continue
        began, wall = time.perf_counter(), time.time()
        _send(group, clock, 1)
        _receive(group, clock, 1)
        taken = time.perf_counter() - began
        if taken < best:
            best, ahead = taken, float(clock[0]) - (wall + taken / 2)
    return best / 2, ahead


def _rate(group: Any, me: int) -> float:
    """Return the bytes a second of the fastest message to and fro; a short one says how long they are."""
    size = torch.tensor([_LEAST])
    seconds = _to_and_fro(group, me, _LEAST)
    size[0] = min(_MOST, max(_LEAST, int(_SECONDS / 2 / _MESSAGES * _LEAST / max(seconds, 1e-6))))
    _send(group, size, 1) if me == 0 else _receive(group, size, 0)
    bytes_sent = int(size[0])
    return bytes_sent / min(_to_and_fro(group, me, bytes_sent) for _ in range(_MESSAGES))


def _to_and_fro(group: Any, me: int, size: int) -> float:
    """Return half the seconds in which ``size`` bytes go to the other end and come back."""
    data = torch.zeros(size, dtype=torch.uint8)
    began = time.perf_counter()
    for sends in (me == 0, me == 1):
        _send(group, data, 1 - me) if sends else _receive(group, data, 1 - me)
    return (time.perf_counter() - began) / 2


def _send(group: Any, data: Tensor, to: int) -> None:
    group.send([data], to, 0).wait()


def _receive(group: Any, data: Tensor, source: int) -> None:
    group.recv([data], source, 0).wait()
