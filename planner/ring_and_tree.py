"""Compute what a rank sends in a collective, by a ring or by two trees.

Sources: Patarasu and Yuan 2009 (rings); Sanders, Speck and Traeff 2009 (two trees, as in NCCL).
"""


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


def tree_all_reduce_wire_bytes(given_bytes: float, ranks: int) -> float:
    """Return the most bytes that a rank puts on the wire in an all-reduce over two trees.

    Each tree reduces one half of the tensor and sends it back. A rank has two children in one tree and none
    in the other, so it sends one half up in each, and one half to each child.
    """
    return 2 * given_bytes if ranks > 1 else 0.0
