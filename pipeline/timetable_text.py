"""Return a timetable as lines of text: one line for each rank, one or two columns for each unit of time."""

from __future__ import annotations

from collections.abc import Iterator

from .timetable import Timetable


def timetable_lines(found: Timetable, *, width: int = 110) -> Iterator[str]:
    """Return the timetable in as many blocks of lines as ``width`` columns need.

    ``F3`` is a forward for micro-batch 3, ``B3`` its backward, ``I3`` and ``W3`` the two halves of one. Small
    letters are of the rank's second and later stages. Dots are waiting.
    """
    micro_batches = 1 + max(one.action.micro_batch for rank in found.ranks for one in rank)
    cell = 2 + len(str(micro_batches - 1))
    rows = [_row(found, rank, cell) for rank in range(len(found.ranks))]
    length = max(map(len, rows))
    width = max(cell, (width - 9) // cell * cell)
    for start in range(0, length, width):
        for rank, row in enumerate(rows):
            yield f"rank {rank:<3} {row[start : start + width].rstrip()}"
        if start + width < length:
            yield ""


def _row(found: Timetable, rank: int, cell: int) -> str:
    first = found.layout.stages_of(rank)[0]
    columns = ["." + " " * (cell - 1)] * round(found.length)
    for one in found.ranks[rank]:
        begin, stop = round(one.start), round(one.stop)
        word = str(one.action) if one.action.stage == first else str(one.action).lower()
        columns[begin] = word.ljust(cell)
        for column in range(begin + 1, stop):
            columns[column] = "-" * (cell - 1) + " "
    return "".join(columns)
