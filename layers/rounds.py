"""Let whoever watches a loop see few of its rounds, where all of them do the same."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
#: Given the rounds of a loop, and whether they are of ranks, returns those that are to run.
Watch = Callable[[Sequence[Any], bool], Iterable[Any]]

_WATCHES: list[Watch] = []


def rounds(of: Sequence[T], *, of_ranks: bool = False) -> Iterable[T]:
    """Return the rounds of a loop that calls the same operators, on tensors of the same shapes, in each but
    the last, and leaves no new tensor behind; all of them, unless somebody watches. ``of_ranks``: each is of
    another rank, the first of this one; so only the third receives what the one before it has sent.
    """
    return _WATCHES[-1](of, of_ranks) if _WATCHES else of


@contextmanager
def watched_rounds(watch: Watch) -> Iterator[None]:
    """Let ``watch`` say in the block which rounds run: for tensors without numbers, which all do the same."""
    _WATCHES.append(watch)
    try:
        yield
    finally:
        _WATCHES.pop()
