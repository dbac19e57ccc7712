"""Say which sample comes at each place of a run, by pure functions of (seed, step): no state to keep.

Sources are mixed by weight. After any number of draws each has given its share to within one draw. The
pattern repeats after a period in which every source gives a whole number of draws, so a table of one period
answers for any position. The table comes from the earliest deadline first: draw ``j`` of a source with share
``a / M`` may stand where the source would otherwise be a whole draw ahead or behind, slots ``floor(j M / a)``
to ``ceil((j + 1) M / a) - 1``, and such a schedule always exists (Baruah, Cohen, Plaxton and Varvel,
Proportionate progress, 1996).

Each epoch of a source is a permutation of its samples, made by a Feistel network (Luby and Rackoff, 1988) on
the smallest domain ``2**(2h)`` that holds them. Numbers that fall outside are sent through again until they
fall inside (cycle walking, Black and Rogaway, 2002).
"""

import hashlib
import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from fractions import Fraction
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..parallel_state import BadInput, require
from .batch import Batch
from .packing import Ids

_ROUNDS = 8
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

    def locate(self, positions: ArrayLike) -> tuple[Ids, Ids]:
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
    exact_shares = [fraction * LONGEST_PERIOD for fraction in fractions]
    shares = [max(1, int(share)) for share in exact_shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: shares[k] - exact_shares[k])
    for k in by_remainder[: max(0, LONGEST_PERIOD - sum(shares))]:
        shares[k] += 1
    while sum(shares) > LONGEST_PERIOD:
        shares[shares.index(max(shares))] -= 1
    return shares


def _schedule(shares: list[int]) -> Ids:
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


def permute(indices: ArrayLike, n: int, seed: int, epochs: ArrayLike, *, stream: int = 0) -> Ids:
    """Return the places of ``indices`` (whole numbers in ``[0, n)``, any shape) in an epoch's permutation.

    Returns int64 of the same shape. ``epochs``: one for all, or one for each index. ``stream`` gives several
    data sets with one seed an order each. Memory is proportional to ``indices`` and independent of ``n``.
    """
    assert n >= 1 and seed >= 0, (n, seed)
    positions = np.asarray(indices, dtype=np.int64)
    assert positions.size == 0 or (positions.min() >= 0 and positions.max() < n), "an index is outside [0, n)"
    # All epochs at once: of little data, a large batch spans very many.
    distinct, which = np.unique(np.broadcast_to(np.asarray(epochs), positions.shape), return_inverse=True)
    which, keys = which.ravel(), _round_keys(seed, distinct.tolist(), stream)
    half = np.uint64(((n - 1).bit_length() + 1) // 2)
    values = _feistel(positions.astype(np.uint64).ravel(), half, keys, which)
    outside = np.flatnonzero(values >= n)
    while outside.size:  # fewer than 3 in 4 stay outside each time, and a cycle always comes back inside
        values[outside] = _feistel(values[outside], half, keys, which[outside])
        outside = outside[values[outside] >= n]
    return values.astype(np.int64).reshape(positions.shape)


def ids_at(positions: ArrayLike, n: int, seed: int, *, stream: int = 0) -> Ids:
    """Return the sample ids at ``positions`` (from 0 up, any order) of the endless sequence of epochs."""
    epochs, indices = np.divmod(np.asarray(positions, dtype=np.int64), n)
    return permute(indices, n, seed, epochs, stream=stream)


def positions_of(step: int, global_batch: int, rows: range) -> Ids:
    """Return the positions in the endless sequence of these rows, which follow one another, of the global
    batch of ``step``.

    Steps lie end to end over the epochs: a batch may finish one epoch and begin the next, and a batch larger
    than the data spans several epochs.
    """
    assert step >= 0, step
    start = step * global_batch
    return np.arange(start + rows.start, start + rows.stop, dtype=np.int64)


def piece_of(global_batch: int, data_index: int, data_size: int) -> range:
    """Return the rows that a data rank takes: the ranks' pieces, in order, are the global batch."""
    assert global_batch >= 1, global_batch
    if global_batch % data_size:
        expected = f"a multiple of the {data_size} data ranks"
        todo = "Change global_batch or the data axes of the layout"
        raise BadInput("order", "global_batch", expected=expected, found=global_batch, todo=todo)
    assert 0 <= data_index < data_size, (data_index, data_size)
    piece = global_batch // data_size
    return range(data_index * piece, (data_index + 1) * piece)


def _round_keys(seed: int, epochs: list[int], stream: int) -> NDArray[np.uint64]:
    """Return a 64-bit key a round and epoch, from a hash: the same on every machine and in every version."""
    texts = [f"trilith order 1: seed {seed} epoch {epoch} stream {stream}" for epoch in epochs]
    hashes = [hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest() for text in texts]
    return np.frombuffer(b"".join(hashes), dtype="<u8").reshape(-1, _ROUNDS).T


def _feistel(
    values: NDArray[np.uint64], half: np.uint64, keys: NDArray[np.uint64], which: NDArray[np.intp]
) -> NDArray[np.uint64]:
    """Permute ``[0, 2**(2 * half))``, each value by the keys of its epoch: each round swaps the halves and
    mixes one into the other.
    """
    low_bits = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & low_bits
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key[which]) & low_bits)
    return (left << half) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's finaliser (Steele, Lea and Flood, 2014): each bit depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SampleOrder(ABC):
    """Say which sample each row of a step is: the same for any number of data ranks.

    An epoch gives each sample of a source once, in an order of its own. If a step needs more than the epoch
    has left, the next epoch follows in the same batch. ``lengths``: number of samples of each source.
    """

    sequence_length: int

    def __init__(self, interleave: Interleave, lengths: Sequence[int], global_batch: int, seed: int) -> None:
        self._interleave, self._lengths = interleave, lengths
        self.global_batch, self.seed = global_batch, seed

    def resized(self, global_batch: int) -> Self:
        """Return the same rows in the same order, in batches of another size."""
        other = copy(self)
        other.global_batch = global_batch
        return other

    @property
    def samples(self) -> int:
        """Return the number of different rows over all sources."""
        return sum(self._lengths)

    def described(self, steps: int) -> str:
        """Return in words how many rows there are, and how often a run of ``steps`` steps takes each."""
        drawn, period = steps * self.global_batch, self._interleave.period
        pairs = zip(self._interleave.shares, self._lengths, strict=True)
        epochs = sorted(drawn * share / period / length for share, length in pairs)
        sources = f" of {len(epochs)} sources" if epochs[1:] else ""
        rows = "row" if self.samples == 1 else "rows"
        ends = [f"{n:,.0f}" if n >= 100 else f"{n:.3g}" for n in (epochs[0], epochs[-1])]
        span = " to ".join(dict.fromkeys(ends))
        return f"{self.samples:,} {rows}{sources}, {span} {'epoch' if span == '1' else 'epochs'}"

    @abstractmethod
    def rows(self, step: int, rows: range) -> Batch | dict[str, Tensor]:
        """Return these rows, which follow one another, of the global batch of ``step``."""

    def sample_ids(self, step: int, rows: range) -> tuple[Ids, Ids]:
        """Return, for each of these rows, the number of its source and its number in that source."""
        sources, draws = self._interleave.locate(positions_of(step, self.global_batch, rows))
        ids = np.empty_like(draws)
        for source in np.unique(sources):
            of_source = sources == source
            ids[of_source] = ids_at(draws[of_source], self._lengths[source], self.seed, stream=int(source))
        return sources, ids

    def _shared(self, fingerprints: Sequence[str]) -> str:
        """Return what a manifest keeps of several sources: what each is, and its share."""
        if len(fingerprints) == 1:
            return fingerprints[0]
        shares = zip(self._interleave.shares, fingerprints, strict=True)
        return " + ".join(f"{share}/{self._interleave.period} of {name}" for share, name in shares)
