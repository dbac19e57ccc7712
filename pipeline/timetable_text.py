"""Return a timetable as lines of text: one line for each rank, one or two columns for each unit of time."""

from collections.abc import Iterator

from .timetable import Timetable


def timetable_lines(table: Timetable, *, width: int = 110) -> Iterator[str]:
    """Return the timetable in as many blocks of lines as ``width`` columns need.

    ``F3`` is a forward for micro-batch 3, ``B3`` its backward, ``I3`` and ``W3`` the two halves of one. Small
    letters are of the rank's second and later stages. Dots are waiting.
    """
    micro_batches = 1 + max(timed.action.micro_batch for rank in table.ranks for timed in rank)
    cell = 2 + len(str(micro_batches - 1))
    rows = [_row(table, rank, cell) for rank in range(len(table.ranks))]
    length = max(map(len, rows))
    width = max(cell, (width - 9) // cell * cell)
    for start in range(0, length, width):
        for rank, row in enumerate(rows):
            yield f"rank {rank:<3} {row[start : start + width].rstrip()}"
        if start + width < length:
            yield ""


def _row(table: Timetable, rank: int, cell: int) -> str:
    first = table.layout.stages_of(rank)[0]
    columns = ["." + " " * (cell - 1)] * round(table.length)
    for timed in table.ranks[rank]:
        begin, stop = round(timed.start), round(timed.stop)
        word = str(timed.action) if timed.action.stage == first else str(timed.action).lower()
        columns[begin] = word.ljust(cell)
        for column in range(begin + 1, stop):
            columns[column] = "-" * (cell - 1) + " "
    return "".join(columns)
