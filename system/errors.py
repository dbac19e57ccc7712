"""Define the errors for users: one line each, with the exit code of the command that meets it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from math import isqrt
from typing import TYPE_CHECKING

from .addresses import with_addresses
from .refusals import refusal_of
from .text import literal

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


def nearest(key: str, legal: Iterable[int], actual: int) -> str:
    """Return the advice for a number that is not legal: the two nearest legal numbers, or the only one.

    >>> nearest("tensor", [1, 2, 4], 3)
    'Nearest legal tensor: 2 or 4'
    """
    near = sorted(sorted(legal, key=lambda number: abs(number - actual))[:2])
    return f"Nearest legal {key}: {' or '.join(map(str, near))}"


def nearest_divisors(key: str, of: int, actual: int) -> str:
    """Return the same advice as ``nearest`` if the divisors of a number are legal."""
    small = [n for n in range(1, isqrt(of) + 1) if of % n == 0]
    return nearest(key, {*small, *(of // n for n in small)}, actual)


def nearest_multiples(key: str, of: int, actual: int) -> str:
    """Return the same advice as ``nearest`` if the multiples of a number are legal."""
    below = actual // of * of
    return nearest(key, [n for n in (below, below + of) if n], actual)


def _in_words(fact: object) -> object:
    return literal(fact, 1000) if isinstance(fact, bool | tuple) else fact


class BadInput(ValueError):
    """Report input, configuration or a layout that cannot be used.

    The message reads ``<where>: <key>: expected X, found Y. <what to do>``. Commands print it as one line and
    exit with ``exit_code``; nothing has been written by then.
    """

    exit_code = 2

    def __init__(
        self,
        where: object,
        key: object = None,
        *,
        expected: object = None,
        found: object = None,
        todo: str = "",
    ) -> None:
        place = f"{where}" if key is None else f"{where}: {key}"
        both = {"expected": expected, "found": found}
        facts = [f"{word} {_in_words(fact)}" for word, fact in both.items() if fact is not None]
        self.where, self.key, self.expected, self.found, self.todo = where, key, expected, found, todo
        message = f"{place}: {', '.join(facts)}" if facts else place
        super().__init__(with_addresses(f"{message}. {todo}" if todo else message))

    def __reduce__(self) -> tuple[object, ...]:
        facts = partial(type(self), self.where, self.key, expected=self.expected, found=self.found)
        return partial(facts, todo=self.todo), ()


def require(
    holds: object,
    where: object,
    key: object,
    expected: object,
    actual: object = None,
    todo: str = "",
    *,
    kind: type[BadInput] = BadInput,
) -> None:
    """Raise an error of ``kind`` unless something ``holds``; all words are made either way, so they must be
    cheap.
    """
    if not holds:
        raise kind(where, key, expected=expected, found=actual, todo=todo)


class BadCheckpoint(BadInput):
    """Report a checkpoint directory that is absent, incomplete, altered, or of another model. Exit code 4."""

    exit_code = 4


class MachineFailed(RuntimeError):
    """Report that this machine has too little disk space, memory, file descriptors or processes."""

    exit_code = 3


class PeerFailed(RuntimeError):
    """Report that another rank, or a collective with it, failed. Exit code 3."""

    exit_code = 3


def from_os_error(
    error: OSError, where: object, *, expected: object, kind: type[BadInput] = BadInput
) -> BadInput | MachineFailed:
    """Return the error that says what the operating system refused about ``where``.

    It is of ``kind`` if another path would work, and ``MachineFailed`` if the machine is at fault.
    """
    refusal = refusal_of(error)
    assert refusal is not None, error  # a call of the system has a number
    if refusal.code == MachineFailed.exit_code:
        return MachineFailed(f"{where}: {refusal.reason}. {refusal.todo}")
    return kind(where, expected=expected, found=refusal.reason, todo=refusal.todo)


#: A part of a place that is no key: of pydantic's, for a validator or one of several types.
_INSIDE = re.compile(r"(function|constrained)-.*|(dict|list|literal|tuple)\[.*")
_PLAIN = ("bool", "float", "int", "str")


def from_validation(
    where: object,
    error: ValidationError,
    *,
    spelled: Callable[[str], str] = str,
    kind: type[BadInput] = BadInput,
    todo: str = "",
) -> BadInput:
    """Return a ``BadInput`` for the first error of pydantic, and with a missing or unknown key for all that
    are; ``spelled`` gives a field's name in the user's file. ``todo``: what to do about a key that is not
    known.
    """

    def key_of(details: ErrorDetails) -> str:
        place = [part for part in map(str, details["loc"]) if not _INSIDE.fullmatch(part)]
        return spelled(".".join(place[:-1] if len(place) > 1 and place[-1] in _PLAIN else place))

    first, *others = error.errors(include_url=False)
    key = key_of(first) or None
    if first["type"] == "extra_forbidden":
        further = ", ".join(key_of(problem) for problem in others if problem["type"] == "extra_forbidden")
        also = f"Unknown too: {further}" if further else ""
        todo = ". ".join(filter(None, (todo, also)))
        return kind(where, key, expected="a known key", found="an unknown one", todo=todo)
    if first["type"] == "missing":
        absent = [problem for problem in (first, *others) if problem["type"] == "missing"]
        missing = dict.fromkeys(map(key_of, absent))
        expected = "a value" if len(missing) == 1 else "a value each"
        return kind(where, ", ".join(missing), expected=expected, found="nothing")
    text = literal(first["input"], 81)
    return kind(
        where,
        key,
        expected=first["msg"].removeprefix("Input should be "),
        found=text if len(text) <= 80 else f"{text[:80]}…",
    )
