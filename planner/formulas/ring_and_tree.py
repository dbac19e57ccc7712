"""Compute what a rank sends in a collective, by a ring or by two trees, and the seconds over one link.

Sources: Patarasu and Yuan 2009 (rings); Sanders, Speck and Traeff 2009 (two trees, as in NCCL); Thakur et al.
2005 (a message costs a latency and its bytes over the bandwidth).
"""

from __future__ import annotations

from math import ceil, log2


def ring_wire_bytes(kind: str, given_bytes: float, ranks: int) -> float:
    """Return the bytes that each of the ranks puts on the wire with a ring collective.

    ``given_bytes``: the size of the tensor that one rank gives to the collective: the whole one for
    ``all_reduce``, ``reduce_scatter``, ``broadcast`` and ``all_to_all``, its own shard for ``all_gather``,
    the message for ``send`` and ``exchange``.
    """
    others = ranks - 1
    if kind == "all_reduce":  # a reduce-scatter, and an all-gather of what it makes
        return 2 * others * given_bytes / ranks
    if kind == "all_gather":
        return others * given_bytes
    if kind in ("reduce_scatter", "all_to_all"):
        return others * given_bytes / ranks
    if kind in ("send", "exchange", "broadcast"):
        return given_bytes if others else 0.0
    raise ValueError(f"no collective is called {kind!r}")


def ring_messages(kind: str, ranks: int) -> int:
    """Return the number of messages that follow one another in a ring collective: each waits one latency."""
    if kind in ("send", "exchange"):
        return min(ranks - 1, 1)
    return (2 if kind == "all_reduce" else 1) * (ranks - 1)


def ring_seconds(
    kind: str, given_bytes: float, ranks: int, *, bytes_per_second: float, latency_seconds: float = 0.0
) -> float:
    """Return the seconds of a ring collective over links of this bandwidth in each direction."""
    wire = ring_wire_bytes(kind, given_bytes, ranks)
    return wire / bytes_per_second + ring_messages(kind, ranks) * latency_seconds


def tree_all_reduce_wire_bytes(given_bytes: float, ranks: int) -> float:
    """Return the most bytes that a rank puts on the wire in an all-reduce over two trees.

    Each tree reduces one half of the tensor and sends it back. A rank has two children in one tree and none
    in the other, so it sends one half up in each, and one half to each child.
    """
    return 2 * given_bytes if ranks > 1 else 0.0


def tree_all_reduce_seconds(
    given_bytes: float, ranks: int, *, bytes_per_second: float, latency_seconds: float = 0.0
) -> float:
    """Return the seconds of an all-reduce over two trees: twice their height in latencies, up and down."""
    messages = 2 * ceil(log2(ranks))
    wire = tree_all_reduce_wire_bytes(given_bytes, ranks)
    return wire / bytes_per_second + messages * latency_seconds
