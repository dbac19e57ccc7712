"""End a phase that ranks go through together with one exchange: all succeed, or all raise one error."""

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from .state import ParallelState

T = TypeVar("T")

_FAILED_RANK = "failed_rank"


def together(work: Callable[[], T], state: ParallelState) -> list[T]:
    """Run ``work`` on this rank and return every rank's result, in rank order.

    A rank whose work raised still takes part, so that nobody waits for it; then every rank raises the error
    of the lowest rank that failed. Collective over all ranks of ``state``; one device, or a stand-in without
    groups, only runs the work. The number of ranks is not read from torch, because a rank whose process group
    is gone must fail instead of taking its part for the whole.
    """
    world, group = state.layout.world, state.file_group
    if world == 1 or group is None:
        return [work()]
    error: Exception | None = None
    results: list[T] = []
    try:
        results.append(work())
    except Exception as raised:
        error = raised
    outcomes: list[tuple[list[T], Exception | None]] = [([], None)] * world
    dist.all_gather_object(outcomes, (results, _plain(error)), group=group)
    for rank, (_, raised_there) in enumerate(outcomes):
        if raised_there is not None:
            vars(raised_there)[_FAILED_RANK] = rank
            raise raised_there from error
    return [result for returned, _ in outcomes for result in returned]


def all_succeed(work: Callable[[], T], state: ParallelState) -> T:
    """Run ``work`` and return this rank's result, which is not sent; all ranks raise an error of one.

    Collective, as ``together`` is.
    """
    results: list[T] = []
    together(lambda: results.append(work()), state)
    return results[0]


def on_rank_0(work: Callable[[], T], state: ParallelState) -> T | None:
    """Run ``work`` on rank 0 and return its result there, ``None`` elsewhere; all ranks raise its error.

    Collective, as ``together`` is.
    """
    return all_succeed(lambda: None if state.rank else work(), state)


def rank_at_fault(error: Exception, *, default: int) -> int:
    """Return the rank whose work raised this error: the one that ``together`` names, or else this one."""
    rank: int = vars(error).get(_FAILED_RANK, default)
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
