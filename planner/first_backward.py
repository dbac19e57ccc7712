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
    gradients. ``made``: for each stage, the bytes of its blocks' gradients, in the dtype of compute.
    ``lasting_per_byte``: how many bytes last for each of these bytes. ``dropped_per_byte``: how many bytes of
    gathered weights a block's backward drops for each of them.
    """

    shared: dict[tuple[Place, int], float]
    root: float
    made: tuple[float, ...]
    lasting_per_byte: tuple[float, ...]
    dropped_per_byte: float

    def missing(self, absent: Sequence[float], first: bool) -> tuple[float, float]:
        """Return the bytes of lasting gradients that do not exist yet, and of weights that are dropped.

        ``absent``: for each stage, the bytes of its blocks' gradients that are not made yet. ``first``:
        whether no stage of the rank has had a backward before.
        """
        gradients = sum(map(mul, absent, self.lasting_per_byte)) + self.root * first
        return gradients, self.dropped_per_byte * (self.made[0] - absent[0])


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
    made, lasting = list[float](), list[float]()
    for kinds in held.stages:
        made.append(compute * sum(number * one.trained for one, number in kinds))
        stored = sum(number * (one.trained if stay else one.trained_stored) for one, number in kinds)
        lasting.append(size * stored / made[-1] if made[-1] else 0.0)
    last = 0 if several else dropped_in_last(zero, alone, cut, compute, master)
    weights = last * sum(number * one.here for one, number in held.stages[0] if one.trained)
    of_blocks = tuple(made), tuple(lasting), weights / made[0] if made[0] else 0.0
    if not stay:  # the root's buffer is left by a backward
        root = size * held.root.trained_stored + gradient_bytes(work, held)[1]
        return FirstBackward(shared, root, *of_blocks)
    root = size * held.root.trained
    for place, stage in shared:  # those that exist by then, besides those of blocks behind
        if place == "entry":
            shared[place, stage] += root
        elif place not in ("forward", "first forward", "loss"):
            # Of a tied weight the first part waits for the second one, as it is made.
            waits = size * (held.exit - held.tied) + compute * held.tied
            shared[place, stage] += waits * (stage == len(held.stages) - 1)
    return FirstBackward(shared, root, *of_blocks)
