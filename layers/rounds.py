"""Let whoever watches a loop see few of its rounds, where all of them do the same."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
#: Given the rounds of a loop, returns those that are to run.
Watch = Callable[[Sequence[Any]], Iterable[Any]]

_WATCHES: list[Watch] = []


def rounds(of: Sequence[T]) -> Iterable[T]:
    """Return the rounds of a loop that calls the same operators, on tensors of the same shapes, in each but
    the last, and leaves no new tensor behind; all of them, unless somebody watches.
    """
    return _WATCHES[-1](of) if _WATCHES else of


@contextmanager
def watched_rounds(watch: Watch) -> Iterator[None]:
    """Let ``watch`` say in the block which rounds run: for tensors without numbers, which all do the same."""
    _WATCHES.append(watch)
    try:
        yield
    finally:
        _WATCHES.pop()
