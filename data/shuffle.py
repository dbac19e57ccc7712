"""Order samples by a pure function of (seed, epoch), with no list to keep, shuffle or restore.

Each epoch is a permutation of the samples, made by a Feistel network (Luby and Rackoff, 1988) on the smallest
domain ``2**(2h)`` that holds them. Numbers that fall outside are sent through again until they fall inside
(cycle walking, Black and Rogaway, 2002). Any position can be asked for alone: the step is the whole state.
"""

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..parallel_state import BadInput

Ids = NDArray[np.int64]

_ROUNDS = 8


def permute(indices: ArrayLike, n: int, seed: int, epochs: ArrayLike, *, stream: int = 0) -> Ids:
    """Return the places of ``indices`` (whole numbers in ``[0, n)``, any shape) in an epoch's permutation.

    Returns int64 of the same shape. ``epochs``: one for all, or one for each index. ``stream`` gives several
    data sets with one seed an order each. Memory is proportional to ``indices`` and independent of ``n``.
    """
    assert n >= 1 and seed >= 0, (n, seed)
    positions = np.asarray(indices, dtype=np.int64)
    assert positions.size == 0 or (positions.min() >= 0 and positions.max() < n), "an index is outside [0, n)"
    # All epochs at once: of little data, a large batch spans very many.
    seen, which = np.unique(np.broadcast_to(np.asarray(epochs), positions.shape), return_inverse=True)
    which, keys = which.ravel(), _round_keys(seed, seen.tolist(), stream)
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
