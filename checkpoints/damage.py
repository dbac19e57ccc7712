"""Find a good older checkpoint of a run when one is damaged, and say how to continue from it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..parallel_state import BadCheckpoint
from ..storage.file_names import DAMAGED, STEP_NAME, set_aside_name
from .find import complete_checkpoints, step_of
from .manifest import Damaged


@contextmanager
def naming_an_older_one(check: Callable[[Path], None]) -> Iterator[None]:
    """Add the newest older checkpoint that passes ``check`` to an error about a damaged checkpoint of a
    run.
    """
    try:
        yield
    except Damaged as error:
        raise with_older(error, newest_good(older_than(error), check)) from None


def older_than(error: Damaged) -> list[Path]:
    """Return the complete checkpoints of the same run with fewer steps, the newest first."""
    damaged = error.checkpoint
    if STEP_NAME.fullmatch(damaged.name) is None:
        return []
    return [path for path in complete_checkpoints(damaged.parent) if step_of(path) < step_of(damaged)][::-1]


def newest_good(candidates: list[Path], check: Callable[[Path], None]) -> Path | None:
    """Return the first of the candidates that passes ``check``."""
    for path in candidates:
        with suppress(BadCheckpoint):
            check(path)
            return path
    return None


def with_older(error: Damaged, older: Path | None) -> Damaged:
    """Return the same error with the advice to continue from ``older``, if it is not ``None``."""
    if older is None:
        return error
    aside = set_aside_name(error.checkpoint, DAMAGED)
    move = shlex.join(["mv", str(error.checkpoint), str(aside)])
    good = f"The newest good checkpoint is {older}"
    todo = f"{error.todo}. {good}: after `{move}` the same command goes on from it"
    return Damaged(error.where, error.key, expected=error.expected, found=error.found, todo=todo.lstrip(". "))
