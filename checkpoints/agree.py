"""Every phase that ranks go through together ends in one exchange of results: all succeed, or all raise one
error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def together(work: Callable[[], T], *, world: int, group: dist.ProcessGroup | None) -> list[T]:
    """Run ``work`` on this rank and give every rank's result, in rank order.

    A rank whose work raised still takes part, so nobody waits for it; then every rank raises the error of the
    lowest rank that failed. Collective over ``group``, all ``world`` ranks; in a world of one it is just the
    work. ``world`` is said, not asked of torch: a rank whose process group is gone must fail, not go on alone
    and take its part for the whole.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    if world == 1:
        if error is not None:
            raise error
        return [result]  # type: ignore[list-item]  # no error, so it is the work's result
    outcomes: list[tuple[T | None, Exception | None]] = [(None, None)] * world
    dist.all_gather_object(outcomes, (result, _plain(error)), group=group)
    for rank, (_, raised_there) in enumerate(outcomes):
        if raised_there is not None:
            raised_there.failed_rank = rank  # type: ignore[attr-defined]  # for whoever says whose fault it was
            raise raised_there from error
    return [there for there, _ in outcomes]  # type: ignore[misc]  # no errors, so all are results


def _plain(error: Exception | None) -> Exception | None:
    """The error without what cannot travel: its traceback and causes."""
    if error is None:
        return None
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
