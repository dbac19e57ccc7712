"""End a phase that ranks go through together with one exchange: all succeed, or all raise one error."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

_FAILED_RANK = "failed_rank"


def together(work: Callable[[], T], *, world: int, group: dist.ProcessGroup | None) -> list[T]:
    """Run ``work`` on this rank and return every rank's result, in rank order.

    A rank whose work raised still takes part, so that nobody waits for it; then every rank raises the error
    of the lowest rank that failed. Collective over ``group`` with all ``world`` ranks; in a world of one it
    only runs the work. ``world`` is an argument and is not read from torch, because a rank whose process
    group is gone must fail instead of taking its part for the whole.
    """
    error: Exception | None = None
    results: list[T] = []
    try:
        results.append(work())
    except Exception as raised:
        error = raised
    if world == 1:
        if error is not None:
            raise error
        return results
    outcomes: list[tuple[list[T], Exception | None]] = [([], None)] * world
    dist.all_gather_object(outcomes, (results, _plain(error)), group=group)
    for rank, (_, raised_there) in enumerate(outcomes):
        if raised_there is not None:
            vars(raised_there)[_FAILED_RANK] = rank
            raise raised_there from error
    return [result for there, _ in outcomes for result in there]


def rank_at_fault(error: Exception, *, here: int) -> int:
    """Return the rank whose work raised this error: the one that ``together`` names, or else this one."""
    rank: int = vars(error).get(_FAILED_RANK, here)
    return rank


def _plain(error: Exception | None) -> Exception | None:
    """Return the error in a form that can be pickled: without traceback and causes, or else only its text."""
    if error is None:
        return None
    error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # what a pickle meets in a class of others is anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error.with_traceback(None)
