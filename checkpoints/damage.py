"""Report that a checkpoint is damaged, and say how to continue from an older one."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from ..parallel_state import BadCheckpoint
from ..storage.file_names import DAMAGED, STEP_NAME, set_aside_name
from .find import complete_checkpoints, step_of
from .manifest import Damaged, Manifest


def damaged(where: object, key: object = None, *, expected: object, found: object, todo: str = "") -> Damaged:
    """Return the error about a byte of ``where``, a checkpoint or a file of it, that is not the one written.

    It names the newest complete checkpoint of the run with fewer steps, and how to go on from it. Nothing but
    the manifest of that one is read: it is verified when it is used.
    """
    error = Damaged(where, key, expected=expected, found=found, todo=todo)
    older = _newest_before(error.checkpoint)
    if older is None:
        return error
    move = shlex.join(["mv", "--", str(error.checkpoint), str(set_aside_name(error.checkpoint, DAMAGED))])
    complete = f"The newest complete checkpoint before it is {older}"
    todo = f"{todo}. {complete}: after `{move}` the same command goes on from it"
    return Damaged(where, key, expected=expected, found=found, todo=todo.lstrip(". "))


def _newest_before(checkpoint: Path) -> Path | None:
    if STEP_NAME.fullmatch(checkpoint.name) is None:
        return None
    for path in reversed(complete_checkpoints(checkpoint.parent)):
        if step_of(path) < step_of(checkpoint):
            with suppress(BadCheckpoint):
                Manifest.load(path, whole=False)
                return path
    return None
