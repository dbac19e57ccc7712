"""Mix sources by weight: compute which source gives draw number ``p``, and which of its own draws that is.

After any number of draws each source has given its share to within one draw. The pattern repeats after a
period in which every source gives a whole number of draws, so a table of one period answers for any position,
with no state. The table comes from the earliest deadline first: draw ``j`` of a source with share ``a / M``
may stand where the source would otherwise be a whole draw ahead or behind, slots ``floor(j M / a)`` to
``ceil((j + 1) M / a) - 1``, and such a schedule always exists (Baruah, Cohen, Plaxton and Varvel,
Proportionate progress, 1996).
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..parallel_state import require

#: The longest period. Weights that have no common denominator up to it are rounded to multiples of its
#: inverse.
LONGEST_PERIOD = 2**16


class Interleave:
    """Compute the endless sequence of draws from sources with these weights (positive, of any sum).

    ``shares[k] / period`` is the exact fraction of source ``k``. It equals the weight if a period of up to
    65,536 draws can hold all weights; otherwise it is the nearest possible fraction, at least 1/65,536.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = _shares(weights)
        self.period = sum(self.shares)
        self._source = _schedule(self.shares)
        self._before = np.empty(self.period, dtype=np.int64)
        for source, share in enumerate(self.shares):
            self._before[self._source == source] = np.arange(share)
        self._shares = np.array(self.shares, dtype=np.int64)

    def locate(self, positions: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return, for each position (from 0 up), the source and how many draws that source gave before it."""
        periods, slots = np.divmod(np.asarray(positions, dtype=np.int64), self.period)
        source = self._source[slots]
        return source, periods * self._shares[source] + self._before[slots]


def _shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the weights, rounded where the period is the longest."""
    require(weights, "mixture", None, "at least one source", "none")
    require(len(weights) <= LONGEST_PERIOD, "mixture", "sources", f"at most {LONGEST_PERIOD}", len(weights))
    for weight in weights:
        fits = math.isfinite(weight) and weight > 0
        require(fits, "mixture", "weight", "a number above 0", weight, "Leave the source out")
    # As written: 0.7 means 7/10, and not the binary fraction next to it.
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    fractions = [weight / total for weight in exact]
    period = math.lcm(*(fraction.denominator for fraction in fractions))
    if period <= LONGEST_PERIOD:
        return [int(fraction * period) for fraction in fractions]
    # A source below one draw a period gets one; the largest remainders take what rounding down left over, and
    # the largest sources give what rounding up took.
    wanted = [fraction * LONGEST_PERIOD for fraction in fractions]
    shares = [max(1, int(share)) for share in wanted]
    by_remainder = sorted(range(len(shares)), key=lambda k: shares[k] - wanted[k])
    for k in by_remainder[: max(0, LONGEST_PERIOD - sum(shares))]:
        shares[k] += 1
    while sum(shares) > LONGEST_PERIOD:
        shares[shares.index(max(shares))] -= 1
    return shares


def _schedule(shares: list[int]) -> NDArray[np.int64]:
    """Return the source of each slot of a period."""
    period = sum(shares)
    drawn = [0] * len(shares)
    waiting = [(0, source) for source in range(len(shares))]
    ready: list[tuple[int, int]] = []
    slots = np.empty(period, dtype=np.int64)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            source = heapq.heappop(waiting)[1]
            deadline = -(-(drawn[source] + 1) * period // shares[source]) - 1
            heapq.heappush(ready, (deadline, source))
        deadline, source = heapq.heappop(ready)
        assert deadline >= slot, (shares, slot)
        slots[slot] = source
        drawn[source] += 1
        heapq.heappush(waiting, (drawn[source] * period // shares[source], source))
    return slots
