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

    least = _best(len(blocks), stages, lambda s, a, b, rest: max(cost(s, a, b), rest))[0]
    room = least * (1 + 1e-12)
    return _best(
        len(blocks),
        stages,
        lambda s, a, b, rest: cost(s, a, b) ** 2 + rest if cost(s, a, b) <= room else float("inf"),
    )[1]


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
    blocks: int, stages: int, value: Callable[[int, int, int, float], float]
) -> tuple[float, list[int]]:
    """Return the least value of any cut, and that cut, computed from the last stage back to the first."""
    after: dict[int, tuple[float, list[int]]] = {blocks: (0.0, [])}
    for stage in reversed(range(stages)):
        now: dict[int, tuple[float, list[int]]] = {}
        for start in range(stage, blocks) if stage else (0,):
            choices = [
                (value(stage, start, stop, rest), [stop - start, *counts])
                for stop, (rest, counts) in after.items()
                if stop > start
            ]
            if choices:
                now[start] = min(choices)
        after = now
    return after[0]
