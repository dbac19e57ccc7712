"""Count the gradients that are not there yet in the first backward of a step.

A rank has none before it. They appear block by block, from the last block to the first one, while activations
are given back. This matters where the first backward holds more activations than later ones: in a step of one
micro-batch, and in a pipeline whose forwards all come before the first backward.
"""

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


def first_backward(work: Work, parameters: RankParameters, shared: SharedKey) -> FirstBackward:
    """Return the bytes of the first backward; a search asks for them often. ``shared``: ``shared_key``."""
    key = "first", work.offload, shared
    if key not in parameters.known_shared:
        parameters.known_shared[key] = _first_backward(work, parameters, shared)
    backward: FirstBackward = parameters.known_shared[key]
    return backward


def _first_backward(work: Work, parameters: RankParameters, key: SharedKey) -> FirstBackward:
    zero, shards, alone, several, cut, in_two, compute, reduce, master = key
    # Gradients stay where they are made, or they are summed and shards of the sums stay.
    stay = alone or (several and zero < 2)
    shared = places_shared(parameters, zero, shards, stay, False, cut, in_two, compute, reduce, master)
    size = reduce if stay and several else 0 if work.offload else master
    made, lasting = list[float](), list[float]()
    for kinds in parameters.stages:
        made.append(compute * sum(number * group.trained for group, number in kinds))
        stored = sum(number * (group.trained if stay else group.trained_stored) for group, number in kinds)
        lasting.append(size * stored / made[-1] if made[-1] else 0.0)
    last = 0 if several else dropped_in_last(zero, alone, cut, compute, master)
    weights = last * sum(number * group.here for group, number in parameters.stages[0] if group.trained)
    of_blocks = tuple(made), tuple(lasting), weights / made[0] if made[0] else 0.0
    if not stay:  # the root's buffer is left by a backward
        root = size * parameters.root.trained_stored + gradient_bytes(work, parameters)[1]
        return FirstBackward(shared, root, *of_blocks)
    root = size * parameters.root.trained
    for place, stage in shared:  # those that exist by then, besides those of blocks behind
        if place == "entry":
            shared[place, stage] += root
        elif place not in ("forward", "first forward", "loss"):
            # Of a tied weight the first part waits for the second one, as it is made.
            waits = size * (parameters.exit - parameters.tied) + compute * parameters.tied
            shared[place, stage] += waits * (stage == len(parameters.stages) - 1)
    return FirstBackward(shared, root, *of_blocks)
