"""Check, before any collective, that every rank has come and that all ranks are about to run the same recipe.

Ranks meet at torch's key-value store. Each rank writes a card with the facts of its run. Rank 0 compares the
cards and writes one verdict, which all ranks read. So within the timeout an error names the rank that is
missing or different, and no rank waits for it in a collective.
"""

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from ..parallel_state import BadInput, Launched, PeerFailed
from ..system import quiet_libraries

_MOST_NAMED = 8
#: Rank 0 gives up on absent ranks a timeout after it came; the others wait this much longer for its verdict.
_GRACE = timedelta(seconds=3)
#: Set by the first rank when it leaves; no run is longer than the time that a spare waits for it.
_LEFT, _LONGEST = "left", timedelta(days=365)


@quiet_libraries()
def join(process: Launched, card: Mapping[str, str], timeout: timedelta) -> dist.Store:
    """Return the store for ``init_process_group``, once all ranks of torchrun's environment have come.

    ``card`` names facts that must be alike on all ranks (a recipe's hash, a version). Raises, the same on
    every rank, ``PeerFailed`` naming ranks that did not come within ``timeout``, or ``BadInput`` naming the
    ranks that differ and in what. Torch's own account of a failure, up to a hundred lines, is dropped.
    """
    rank, world = process.rank, process.world
    store = _shared(process, timeout)
    store.set(f"card/{rank}", json.dumps(dict(card)))
    if rank == 0:
        verdict = _judge(store, world, timeout)
        store.set("verdict", json.dumps(verdict))
        if verdict is not None:
            _wait_for_readers(store, world)
    else:
        verdict = json.loads(_verdict(store, rank, timeout))
        store.set(f"read/{rank}", "")
    if isinstance(verdict, str):
        raise PeerFailed(f"{verdict} missing: {_seconds(timeout)} after the others came")
    if verdict is not None:
        key, common, odd = verdict
        todo = "Start every rank with the same recipe, code and packages"
        raise BadInput("launch", key, expected=common, found=odd, todo=todo)
    return store


@quiet_libraries()
def wait_as_spare(process: Launched, timeout: timedelta) -> None:
    """Wait, as a rank that the layout does not use, until the first rank has left; take no part in the run.

    If such a rank ended at once, torchrun would count it as finished and not start it again after a failure.
    Raises ``PeerFailed`` if the first rank does not come within ``timeout``.
    """
    store = _shared(process, timeout)
    with suppress(dist.DistError):  # the store is gone: so is the run
        store.wait([_LEFT], _LONGEST)


def tell_spares(store: dist.Store) -> None:
    """Let the ranks that wait as spares end."""
    store.set(_LEFT, "")


def _shared(process: Launched, timeout: timedelta) -> dist.Store:
    """Return the store of this start; a restart by torchrun begins with an empty one."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"trilith/{restart}", open_store(process, timeout))


def open_store(process: Launched, timeout: timedelta) -> dist.Store:
    """Return torchrun's store, or one that rank 0 opens at MASTER_PORT; it waits for nobody."""
    host, port = process.host, process.port
    _check_name(process)
    opens = process.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(host, port, is_master=opens, timeout=timeout, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if not opens:
            text = f"rank 0 missing: nobody answers at {host}:{port} within {_seconds(timeout)}"
            raise PeerFailed(text) from error
        for code, problem in (("EADDRINUSE", "in use"), ("EACCES", "that only an administrator may open")):
            if code in str(error):
                todo = "Choose another MASTER_PORT, or let torchrun choose one"
                raise _bad("MASTER_PORT", "a free port", f"port {port} {problem}", todo) from error
        expected = "an address of this machine, where rank 0 runs"
        raise _bad("MASTER_ADDR", expected, f"{host}, which leads elsewhere") from error


def _check_name(process: Launched) -> None:
    """Refuse a MASTER_ADDR that is unknown here: torch would try it until the timeout, and print pages."""
    try:
        socket.getaddrinfo(process.host, process.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        expected = "a host that this machine can find"
        raise _bad("MASTER_ADDR", expected, f"{process.host!r} ({why})") from None


def _bad(name: str, expected: str, found: str, todo: str = "") -> BadInput:
    return BadInput("environment", name, expected=expected, found=found, todo=todo)


def _verdict(store: dist.Store, rank: int, timeout: timedelta) -> bytes:
    """Return rank 0's verdict. Once rank 0 has come, it waits one more timeout for the others."""
    try:
        store.wait(["card/0"], timeout)
    except RuntimeError as error:
        store.delete_key(f"card/{rank}")  # whoever comes now must not count on this rank
        raise PeerFailed(f"rank 0 missing: it gave no sign within {_seconds(timeout)}") from error
    try:
        store.wait(["verdict"], timeout + _GRACE)
    except RuntimeError as error:
        raise PeerFailed(f"rank 0 came and left without a word within {_seconds(timeout)}") from error
    return store.get("verdict")


def _judge(store: dist.Store, world: int, timeout: timedelta) -> str | tuple[str, str, str] | None:
    """Return ``None`` if all is well, else the missing ranks, or the first fact on which ranks differ: its
    name, the value that most ranks have, and the other value with its ranks.
    """
    try:
        store.wait([f"card/{rank}" for rank in range(world)], timeout)
    except RuntimeError:
        return _ranks([rank for rank in range(world) if not store.check([f"card/{rank}"])])
    cards = [json.loads(card) for card in store.multi_get([f"card/{rank}" for rank in range(world)])]
    for key in cards[0]:
        values = [card.get(key) for card in cards]
        common, _ = Counter(values).most_common(1)[0]
        odd = [rank for rank, value in enumerate(values) if value != common]
        if odd:
            return key, common, f"{values[odd[0]]} on {_ranks(odd)}"
    return None


def _wait_for_readers(store: dist.Store, world: int) -> None:
    """Wait until all present ranks have read the verdict: the store may be in this process, rank 0."""
    present = [rank for rank in range(1, world) if store.check([f"card/{rank}"])]
    with suppress(RuntimeError):
        store.wait([f"read/{rank}" for rank in present], _GRACE)


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:_MOST_NAMED]))
    others = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {names}{others}"


def _seconds(timeout: timedelta) -> str:
    return f"{timeout.total_seconds():g} s"
