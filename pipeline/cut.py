"""Cut a model into stages so that the slowest stage takes as little time as possible."""

from collections.abc import Sequence


def cut_by_cost(blocks: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Return the number of blocks of each stage, at least one, so that the slowest stage is as fast as
    possible.

    Of such cuts it is the one whose stages are most alike (least sum of squares); of these, the first stages
    have least, because they hold the most micro-batches. ``blocks``: the cost of each block. ``first``,
    ``last``: the cost of the ends beside their blocks. Any unit.
    """
    assert 1 <= stages <= len(blocks), (stages, len(blocks))
    sums = [0.0]
    for cost in blocks:
        sums.append(sums[-1] + cost)

    even = [len(blocks) * (stage + 1) // stages - len(blocks) * stage // stages for stage in range(stages)]
    room = max(stage_costs(even, blocks, first=first, last=last))
    ends = [first * (stage == 0) + last * (stage == stages - 1) for stage in range(stages)]
    least = _best(sums, ends, room * (1 + 1e-12), squares=False)[0]
    return _best(sums, ends, least * (1 + 1e-12), squares=True)[1]


def stage_costs(
    counts: Sequence[int], blocks: Sequence[float], *, first: float = 0.0, last: float = 0.0
) -> list[float]:
    """Return the cost of each stage of a cut."""
    costs, start = [], 0
    for count in counts:
        costs.append(sum(blocks[start : start + count]))
        start += count
    costs[0] += first
    costs[-1] += last
    return costs


def _best(
    sums: Sequence[float], ends: Sequence[float], room: float, *, squares: bool
) -> tuple[float, list[int]]:
    """Return the least value of any cut whose stages cost at most ``room``, and that cut, computed from the
    last stage back to the first. The value is the sum of squares, or the largest cost. Of equal ones it is
    the cut whose first stages have least.

    ``sums[n]``: the cost of the first n blocks; ``ends``: what each stage costs beside its blocks.
    """
    blocks = len(sums) - 1
    after: dict[int, tuple[float, list[int]]] = {blocks: (0.0, [])}
    for stage in reversed(range(len(ends))):
        now: dict[int, tuple[float, list[int]]] = {}
        for start in range(stage, blocks) if stage else (0,):
            least, where, before = 0.0, -1, sums[start]
            for stop in range(start + 1, blocks + 1):
                cost = sums[stop] - before + ends[stage]
                if cost > room:
                    break
                if stop in after:
                    rest = after[stop][0]
                    value = cost**2 + rest if squares else max(cost, rest)
                    if where < 0 or value < least:
                        least, where = value, stop
            if where >= 0:
                now[start] = least, [where - start, *after[where][1]]
        after = now
    return after[0]
