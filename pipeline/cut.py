"""Cut a model into stages so that the slowest stage takes as little time as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def cut_by_cost(blocks: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Return the number of blocks of each stage, at least one, so that the slowest stage is as fast as
    possible.

    Of such cuts it is the one whose stages are most alike (least sum of squares); of these, the first stages
    have least, because they hold the most micro-batches. ``blocks``: the cost of each block. ``first``,
    ``last``: the cost of the ends beside their blocks. Any unit.
    """
    assert 1 <= stages <= len(blocks), (stages, len(blocks))
    sums = [0.0]
    for one in blocks:
        sums.append(sums[-1] + one)

    def cost(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + first * (stage == 0) + last * (stage == stages - 1)

    even = [len(blocks) * (stage + 1) // stages - len(blocks) * stage // stages for stage in range(stages)]
    room = max(stage_costs(even, blocks, first=first, last=last))
    least = _best(len(blocks), stages, cost, max, room * (1 + 1e-12))[0]
    return _best(len(blocks), stages, cost, lambda one, rest: one**2 + rest, least * (1 + 1e-12))[1]


def stage_costs(
    counts: Sequence[int], blocks: Sequence[float], *, first: float = 0.0, last: float = 0.0
) -> list[float]:
    """Return the cost of each stage of a cut."""
    found, start = [], 0
    for count in counts:
        found.append(sum(blocks[start : start + count]))
        start += count
    found[0] += first
    found[-1] += last
    return found


def _best(
    blocks: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    value: Callable[[float, float], float],
    room: float,
) -> tuple[float, list[int]]:
    """Return the least value of any cut whose stages cost at most ``room``, and that cut, computed from the
    last stage back to the first.
    """
    after: dict[int, tuple[float, list[int]]] = {blocks: (0.0, [])}
    for stage in reversed(range(stages)):
        now: dict[int, tuple[float, list[int]]] = {}
        for start in range(stage, blocks) if stage else (0,):
            choices = []
            for stop in range(start + 1, blocks + 1):
                if (one := cost(stage, start, stop)) > room:
                    break
                if stop in after:
                    rest, counts = after[stop]
                    choices.append((value(one, rest), [stop - start, *counts]))
            if choices:
                now[start] = min(choices)
        after = now
    return after[0]
