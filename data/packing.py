"""Pack samples into rows: as few rows as best fit needs, computed from the lengths alone.

Best fit decreasing: the longest samples first, each into the fullest row that still holds it. Samples of one
length are placed together, so the work is by lengths and not by samples. The rows are the same on every rank,
in every epoch and after a resume; epochs shuffle whole rows. Source: Johnson, 1973; for training: Krell et
al., Efficient sequence packing without cross-contamination, 2021.
"""

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Row ``r`` holds the samples ``samples[starts[r] : starts[r + 1]]``, in this order."""

    samples: Ids
    starts: Ids

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> Ids:
        return self.samples[self.starts[row] : self.starts[row + 1]]


def one_a_row(samples: Ids) -> Rows:
    """Give each sample a row of its own, without packing."""
    return Rows(samples, np.arange(len(samples) + 1, dtype=np.int64))


def pack(lengths: ArrayLike, room: int) -> Rows:
    """Pack samples of these lengths, each from 1 to ``room``, into rows of ``room`` places; each one once."""
    lengths = np.asarray(lengths, dtype=np.int64)
    assert lengths.ndim == 1 and (lengths.size == 0 or 1 <= lengths.min() <= lengths.max() <= room)
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), dtype=np.int64)
    shelf = _Shelf(room)
    ends = np.flatnonzero(np.diff(lengths[order], append=0)) + 1
    start = 0
    for end in ends.tolist():
        length = int(lengths[order[start]])
        row_of[order[start:end]] = shelf.place(length, end - start)
        start = end
    # By row, and within a row as they were placed.
    by_row = order[np.argsort(row_of[order], kind="stable")]
    counts = np.bincount(row_of, minlength=shelf.rows)
    return Rows(by_row, np.concatenate(([0], np.cumsum(counts))).astype(np.int64))


class _Shelf:
    """Hold the rows begun so far, sorted by the room that is left in them."""

    def __init__(self, room: int) -> None:
        self.room, self.rows = room, 0
        self._left: list[int] = []  # the rooms that some row has, in rising order
        self._by_room: dict[int, list[Ids]] = {}

    def place(self, length: int, count: int) -> Ids:
        """Place ``count`` samples of one length and return their rows."""
        placed = []
        while count:
            at = bisect.bisect_left(self._left, length)
            if at == len(self._left):
                in_row = self.room // length
                new = -(-count // in_row)
                self._put(self.room, np.arange(self.rows, self.rows + new, dtype=np.int64))
                self.rows += new
                continue
            room = self._left.pop(at)
            rows, in_row = np.concatenate(self._by_room.pop(room)), room // length
            # Best fit fills a row before it goes to the next: what is left of the fullest is fuller still.
            full, rest = min(len(rows), count // in_row), 0
            placed.append(np.repeat(rows[:full], in_row))
            self._put(room - in_row * length, rows[:full])
            count -= full * in_row
            if count and full < len(rows):
                rest, count = count, 0
                placed.append(np.repeat(rows[full : full + 1], rest))
                self._put(room - rest * length, rows[full : full + 1])
            self._put(room, rows[full + bool(rest) :])
        return np.concatenate(placed)

    def _put(self, room: int, rows: Ids) -> None:
        if not len(rows) or not room:
            return
        if room not in self._by_room:
            bisect.insort(self._left, room)
            self._by_room[room] = []
        self._by_room[room].append(rows)
