"""Remember what methods returned, for as long as their object lives."""

from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any, Concatenate, ParamSpec, TypeVar

Own = TypeVar("Own")
Returned = TypeVar("Returned")
Arguments = ParamSpec("Arguments")


def remembered(
    method: Callable[Concatenate[Own, Arguments], Returned],
) -> cached_property[Callable[Arguments, Returned]]:
    """Make a method return the same object for equal arguments, which are hashable.

    An object and what it remembers hold each other, so this is for objects that live long.
    """

    def of(own: Own) -> Any:
        return cache(partial(method, own))

    return cached_property(of)
