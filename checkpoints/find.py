"""Find the checkpoint of a training run to resume by looking at the folders; there is no pointer file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from ..parallel_state import BadCheckpoint
from ..storage.file_names import MANIFEST, STEP_NAME, finished_name
from .manifest import Manifest
from .reading_lock import Hold, hold

#: A run that saves meanwhile deletes what was just found; each time there is a newer one.
_TRIES = 100


@dataclass(frozen=True, slots=True)
class Found:
    """Hold a complete checkpoint, and a line for the user about each newer one that is not complete.

    Retention does not delete the checkpoint as long as the object ``held`` lives.
    """

    directory: Path
    manifest: Manifest
    warnings: tuple[str, ...]
    held: Hold


def step_directory(root: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint in the directory of its run."""
    return root / f"step-{step:08d}"


def complete_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints in ``root`` that have a manifest, by step; unfinished ones have none."""
    names = (path for path in root.iterdir() if STEP_NAME.fullmatch(path.name))
    return sorted((path for path in names if (path / MANIFEST).exists()), key=step_of)


def step_of(directory: Path) -> int:
    """Return the step of a run's checkpoint, from its directory's name."""
    return int(directory.name.removeprefix("step-"))


def open_checkpoint(directory: Path | str) -> Found:
    """Open the complete checkpoint in a directory and hold it; ``BadCheckpoint`` says what is wrong."""
    directory = Path(directory)
    Manifest.check_there(directory)
    held = hold(directory)
    return Found(directory, Manifest.load(directory), (), held)


def latest_checkpoint(root: Path | str) -> Found:
    """Return the complete checkpoint of the highest step, held against deletion.

    Raises ``BadCheckpoint`` if there is none; the error says what the folder has instead.
    """
    root = Path(root)
    if not root.is_dir():
        found = "a file" if root.exists() else "no such directory"
        raise BadCheckpoint(root, expected="a directory of checkpoints", found=found)
    for _ in range(_TRIES):
        seen = sorted(path.name for path in root.iterdir())
        try:
            return _latest(root)
        except BadCheckpoint:
            if seen == sorted(path.name for path in root.iterdir()):
                raise
    return _latest(root)


def _latest(root: Path) -> Found:
    names = [path.name for path in root.iterdir() if path.is_dir()]
    steps = sorted((int(match[1]), name) for name in names if (match := STEP_NAME.fullmatch(name)))
    for (step, name), (next_step, other) in pairwise(steps):
        if step == next_step:  # such as step-00000005 and step-5: nobody knows which of them is meant
            raise BadCheckpoint(
                root,
                f"step {step}",
                expected="one directory",
                found=f"{name}, {other}",
                todo="Move all but one of them to another place",
            )
    warnings: list[str] = []
    for _, name in reversed(steps):
        try:
            found = open_checkpoint(root / name)
        except BadCheckpoint as error:
            if (root / name).is_dir():  # else a run deleted it meanwhile
                warnings.append(f"not resumed from: {error}")
            continue
        return replace(found, warnings=tuple(f"{line}; using {name}" for line in warnings))
    unfinished = sorted(name for name in names if finished_name(name) is not None)
    seen = [*warnings, *(f"unfinished: {name}" for name in unfinished)]
    raise BadCheckpoint(root, expected="a complete checkpoint", found="; ".join(seen) or "none")
