"""Count the gradients that are not there yet in the first backward of a step.

A rank has none before it. They appear block by block, from the last block to the first one, while activations
are given back. This matters where the first backward holds more activations than later ones: in a step of one
micro-batch, and in a pipeline whose forwards all come before the first backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from .rank_parameters import RankParameters
from .shared_in_step import Place, SharedKey, dropped_in_last, gradient_bytes, places_shared
from .step_shape import Work


class FirstBackward(NamedTuple):
    """State the bytes of the first backward of a step.

    ``shared``: what ``shared_bytes`` returns for later ones. ``root``: the bytes of the root's lasting
    gradients. ``gradients``: for each stage, those of one of its blocks. ``weights``: the bytes of a block's
    gathered weights, if its backward drops them, and ``blocks``: how many blocks there are.
    """

    shared: dict[tuple[Place, int], float]
    root: float
    gradients: tuple[float, ...]
    weights: float
    blocks: int

    def missing(self, absent: Sequence[int], first: bool) -> tuple[float, float]:
        """Return the bytes of lasting gradients that do not exist yet, and of weights that are dropped.

        ``absent``: for each stage, how many blocks have no gradients. ``first``: whether no stage of the rank
        has had a backward before.
        """
        gradients = sum(map(mul, absent, self.gradients)) + self.root * first
        return gradients, self.weights * (self.blocks - absent[0])


def first_backward(work: Work, held: RankParameters, shared: SharedKey) -> FirstBackward:
    """Return the bytes of the first backward; a search asks for them often. ``shared``: ``shared_key``."""
    key = "first", work.offload, shared
    if key not in held.known_shared:
        held.known_shared[key] = _first_backward(work, held, shared)
    found: FirstBackward = held.known_shared[key]
    return found


def _first_backward(work: Work, held: RankParameters, key: SharedKey) -> FirstBackward:
    zero, shards, alone, several, cut, in_two, compute, reduce, master = key
    # Gradients stay where they are made, or they are summed and shards of the sums stay.
    stay = alone or (several and zero < 2)
    shared = places_shared(held, zero, shards, stay, False, cut, in_two, compute, reduce, master)
    size = reduce if stay and several else 0 if work.offload else master
    counts = [max(sum(number for _, number in kinds), 1) for kinds in held.stages]
    sums = [
        sum(number * (one.trained if stay else one.trained_stored) for one, number in kinds)
        for kinds in held.stages
    ]
    gradients = tuple(size * every / count for every, count in zip(sums, counts, strict=True))
    last = 0 if several else dropped_in_last(zero, alone, cut, compute, master)
    weights = last * held.sums_of_stages[0][0] / counts[0]
    if not stay:  # the root's buffer is left by a backward
        root = size * held.root.trained_stored + gradient_bytes(work, held)[1]
        return FirstBackward(shared, root, gradients, weights, counts[0])
    root = size * held.root.trained
    for place, stage in shared:  # those that exist by then, besides those of blocks behind
        if place == "entry":
            shared[place, stage] += root
        elif place not in ("forward", "first forward", "loss"):
            shared[place, stage] += size * held.exit * (stage == len(held.stages) - 1)
        if place in ("last block", "block"):
            shared[place, stage] += size * held.largest_of_blocks
    return FirstBackward(shared, root, gradients, weights, counts[0])
