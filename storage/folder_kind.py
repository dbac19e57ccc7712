"""Decide what kind a folder is, in one place: by files that only that kind has, never by a similar name."""

import os
from collections.abc import Collection
from enum import Enum
from pathlib import Path

from ..parallel_state import BadInput
from .file_names import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    CONFIG,
    INDEX,
    MANIFEST,
    SINGLE,
    STEP_NAME,
    finished_name,
)

#: In a run's folder, the checkpoints; and what a run writes there besides.
CHECKPOINTS = "checkpoints"
_OF_A_RUN = {"run.lock", "metrics.jsonl", "events.jsonl"}


class FolderKind(Enum):
    """Name the kinds of folder, each by its text for the user."""

    MODEL = "a Hugging Face folder"
    ADAPTER = "LoRA adapters in PEFT's folder"
    CHECKPOINT = "a checkpoint"
    CHECKPOINTS = "a folder of checkpoints"
    RUN = "a run's folder"
    TOKENS = "a folder of token files"
    UNFINISHED = "what an unfinished command left"
    OTHER = "none of these"


#: Kinds that a source of weights may be.
SOURCES = (FolderKind.MODEL, FolderKind.CHECKPOINT, FolderKind.CHECKPOINTS, FolderKind.RUN)
#: Kinds that a source of LoRA adapters may be.
ADAPTERS = (FolderKind.ADAPTER, FolderKind.CHECKPOINT, FolderKind.CHECKPOINTS, FolderKind.RUN)

#: The file or folder by which a user says which kind is meant, where a folder is two.
_NAMED = {
    FolderKind.MODEL: CONFIG,
    FolderKind.ADAPTER: ADAPTER_CONFIG,
    FolderKind.CHECKPOINT: MANIFEST,
    FolderKind.RUN: CHECKPOINTS,
}


def kind_of_folder(path: Path, among: Collection[FolderKind] = ()) -> tuple[Path, FolderKind]:
    """Return the folder that ``path`` names, and its kind.

    ``path`` is the folder or, for a folder of two kinds, the file that chooses one: ``config.json``,
    ``adapter_config.json`` or ``manifest.json``. ``among``: the kinds that the caller can use; another kind
    is returned only if the folder has none of these. ``BadInput`` if the folder is of two kinds.
    """
    for kind, name in _NAMED.items():
        if path.name == name and path.is_file():
            return path.parent, kind
    if not path.is_dir():
        return path, FolderKind.OTHER
    present = kinds_of(path)
    wanted = [kind for kind in present if kind in among]
    if len(wanted) > 1:
        kinds = " and ".join(kind.value for kind in wanted)
        says = "; ".join(f"{_said(path, kind)} for {kind.value}" for kind in wanted)
        raise BadInput(
            path, expected="a folder of one kind", found=f"both {kinds}", todo=f"Say which is meant: {says}"
        )
    return path, (wanted or present or [FolderKind.OTHER])[0]


def kinds_of(folder: Path) -> list[FolderKind]:
    """Return all kinds of the folder. If there is none, return a run or tokens that it merely looks like."""
    if finished_name(folder.name) is not None:
        return [FolderKind.UNFINISHED]
    names = set(os.listdir(folder))
    weights = {SINGLE, INDEX} & names
    kinds = []
    if MANIFEST in names:
        kinds.append(FolderKind.CHECKPOINT)
    if holds_steps(folder):
        kinds.append(FolderKind.CHECKPOINTS)
    if holds_steps(folder / CHECKPOINTS):
        kinds.append(FolderKind.RUN)
    if {ADAPTER_CONFIG, ADAPTER_MODEL} & names:
        kinds.append(FolderKind.ADAPTER)
    if weights or (CONFIG in names and FolderKind.ADAPTER not in kinds):
        kinds.append(FolderKind.MODEL)
    if not kinds and _OF_A_RUN & names:
        kinds.append(FolderKind.RUN)
    if not kinds and any(name.endswith(".docs.npy") for name in names):
        kinds.append(FolderKind.TOKENS)
    return kinds


def holds_steps(folder: Path) -> bool:
    """Return whether a run has begun to save in the folder: a folder in it has the name of a step."""
    if not folder.is_dir():
        return False
    with os.scandir(folder) as entries:
        return any(_is_step(entry.name) and entry.is_dir() for entry in entries)


def _is_step(name: str) -> bool:
    return STEP_NAME.fullmatch(finished_name(name) or name) is not None


def _said(folder: Path, kind: FolderKind) -> Path:
    if kind is FolderKind.CHECKPOINTS:
        steps = [path for path in folder.iterdir() if _is_step(path.name)]
        return max(steps, key=lambda path: int(path.name.split(".")[0].removeprefix("step-")))
    return folder / _NAMED[kind]
