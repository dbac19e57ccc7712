"""What goes wrong for a user, said in one line, with the exit code of the command that meets it."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(key: str, legal: Iterable[int], asked: int) -> str:
    """What to do about a number that is not legal: the two nearest that are, or the only one.

    >>> nearest("tensor", [1, 2, 4], 3)
    'Nearest legal tensor: 2 or 4'
    """
    near = sorted(sorted(legal, key=lambda number: abs(number - asked))[:2])
    return f"Nearest legal {key}: {' or '.join(map(str, near))}"


def nearest_divisors(key: str, of: int, asked: int) -> str:
    """The same, where divisors of a number are legal."""
    return nearest(key, (n for n in range(1, of + 1) if of % n == 0), asked)


def nearest_multiples(key: str, of: int, asked: int) -> str:
    """The same, where multiples of a number are legal."""
    below = asked // of * of
    return nearest(key, [n for n in (below, below + of) if n], asked)


class BadInput(ValueError):
    """Input, configuration or layout that cannot be used.

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
        facts = [f"expected {expected}"] if expected is not None else []
        facts += [f"found {found}"] if found is not None else []
        self.where, self.key, self.expected, self.found, self.todo = where, key, expected, found, todo
        message = f"{place}: {', '.join(facts)}" if facts else place
        super().__init__(f"{message}. {todo}" if todo else message)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.where, self.key, self.expected, self.found, self.todo))


class BadCheckpoint(BadInput):
    """A checkpoint directory that is absent, incomplete, altered, or of another model."""

    exit_code = 4


class PeerFailed(RuntimeError):
    """Another rank, or a collective with it, failed."""

    exit_code = 3


def _rebuild(
    kind: type[BadInput], where: object, key: object, expected: object, found: object, todo: str
) -> BadInput:
    return kind(where, key, expected=expected, found=found, todo=todo)
