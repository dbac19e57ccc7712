"""Name files and folders, and decide what kind a folder is, in one place: a checkpoint, a run, a Hugging Face
folder. It is decided by files that only that kind has, never by a similar name.
"""

import os
import re
from collections.abc import Collection
from enum import Enum
from itertools import count
from pathlib import Path

from ..parallel_state import BadInput

MANIFEST = "manifest.json"
#: The name of a checkpoint of a run, with its step.
STEP_NAME = re.compile(r"step-([0-9]+)")
#: How the name ends of a damaged checkpoint that made way for a new one, and of a log's broken lines.
DAMAGED, BROKEN = ".damaged", ".broken"
_OF_RANK = re.compile(r"rank-([0-9]{5,})-of-([0-9]{5,})\.safetensors")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: The same in the form before safetensors: archives of ``torch.save``.
OLD_SINGLE, OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHTS_OF_A_MODEL = (SINGLE, INDEX, OLD_SINGLE, OLD_INDEX)
CONFIG = "config.json"
#: PEFT's names of the same, for adapters.
ADAPTER_MODEL, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
OLD_ADAPTER_MODEL = "adapter_model.bin"
#: The index of a checkpoint of ``torch.distributed.checkpoint``.
DCP_METADATA = ".metadata"

#: How the name of a token file's list of documents ends.
_DOCUMENTS = ".docs.npy"

#: In a run's folder, the checkpoints; and what a run writes there besides.
CHECKPOINTS = "checkpoints"
_OF_A_RUN = {"run.lock", "metrics.jsonl", "events.jsonl"}
#: An unfinished output lies beside its final place; its name is the final one with this ending.
_UNFINISHED = re.compile(r"(.+)\.tmp-[0-9a-f]{16}", re.DOTALL)
#: The most bytes of a name, here and in every sibling of it.
LONGEST_NAME = 255
_ROOM = LONGEST_NAME - len(".tmp-") - 16


def rank_file_name(rank: int, world: int) -> str:
    """Return a name such as ``rank-00003-of-00008.safetensors``, of the file that a rank of a run writes."""
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def rank_and_world(name: str) -> tuple[int, int] | None:
    """Return what ``rank_file_name`` made this name of; ``None`` for any other name."""
    match = _OF_RANK.fullmatch(name)
    numbers = None if match is None else (int(match[1]), int(match[2]))
    return numbers if numbers is not None and rank_file_name(*numbers) == name else None


def beside(output: Path, suffix: str) -> Path:
    """Return a sibling of ``output``: its name, cut where the file system would refuse it, and ``suffix``."""
    return output.parent / (os.fsencode(output.name)[:_ROOM].decode(errors="ignore") + suffix)


def set_aside_name(path: Path, suffix: str = DAMAGED) -> Path:
    """Return a name for what makes way for a new ``path``: its own and ``suffix``; if that exists, the first
    free one that ends in ``-2``, ``-3`` and so on.
    """
    names = (path.with_name(f"{path.name}{suffix}" + (f"-{n}" if n > 1 else "")) for n in count(1))
    return next(name for name in names if not os.path.lexists(name))


def unfinished(output: Path, identity: str) -> Path:
    """Return where an unfinished ``output`` lies; ``identity`` has 16 hexadecimal digits."""
    return beside(output, f".tmp-{identity}")


def finished_name(name: str) -> str | None:
    """Return what the unfinished file or folder ``name`` will be called; ``None`` for any other name."""
    match = _UNFINISHED.fullmatch(name)
    return None if match is None else match[1]


def leftovers(output: Path) -> list[Path]:
    """Find what lies unfinished beside ``output``, made for it by any process."""
    name = finished_name(unfinished(output, "0" * 16).name)
    siblings = output.parent.iterdir() if output.parent.is_dir() else ()
    return [path for path in siblings if finished_name(path.name) == name]


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
    wanted_kinds = [kind for kind in present if kind in among]
    if len(wanted_kinds) > 1:
        kinds = " and ".join(kind.value for kind in wanted_kinds)
        says = "; ".join(f"{_said(path, kind)} for {kind.value}" for kind in wanted_kinds)
        todo = f"Say which is meant: {says}"
        raise BadInput(path, expected="a folder of one kind", found=f"both {kinds}", todo=todo)
    return path, (wanted_kinds or present or [FolderKind.OTHER])[0]


def kinds_of(folder: Path) -> list[FolderKind]:
    """Return all kinds of the folder. If there is none, return a run or tokens that it merely looks like."""
    if finished_name(folder.name) is not None:
        return [FolderKind.UNFINISHED]
    names = set(os.listdir(folder))
    adapters = {ADAPTER_CONFIG, ADAPTER_MODEL} & names
    signs = {
        FolderKind.CHECKPOINT: MANIFEST in names,
        FolderKind.CHECKPOINTS: holds_steps(folder),
        FolderKind.RUN: holds_steps(folder / CHECKPOINTS),
        FolderKind.ADAPTER: adapters,
        FolderKind.MODEL: {SINGLE, INDEX} & names or (CONFIG in names and not adapters),
    }
    kinds = [kind for kind, sign in signs.items() if sign]
    if not kinds and _OF_A_RUN & names:
        kinds.append(FolderKind.RUN)
    if not kinds and any(name.endswith(_DOCUMENTS) for name in names):
        kinds.append(FolderKind.TOKENS)
    return kinds


def named_tokens(path: Path) -> Path | None:
    """Return the name of a token file, without an ending: of the first in a folder, or of that whose name, or
    ``.bin``, ``path`` is; ``None`` if there is none.
    """
    if path.is_dir():
        names = sorted(name for name in os.listdir(path) if name.endswith(_DOCUMENTS))
        return path / names[0].removesuffix(_DOCUMENTS) if names else None
    name = path.with_name(path.name.removesuffix(".bin"))
    return name if os.path.lexists(f"{name}{_DOCUMENTS}") else None


def holds_steps(folder: Path) -> bool:
    """Return whether a run has begun to save in the folder: a folder in it has the name of a step."""
    if not os.path.isdir(folder):  # nor one around which may not be read
        return False
    with os.scandir(folder) as entries:
        return any(_is_step(entry.name) and entry.is_dir() for entry in entries)


def kept_by_runs(folder: Path) -> str:
    """Return what of a run the folder keeps, in words; an empty text if it keeps nothing."""
    if holds_steps(folder) or (folder.name == CHECKPOINTS and FolderKind.RUN in kinds_of(folder.parent)):
        return "a run's checkpoints"
    if FolderKind.CHECKPOINT in kinds_of(folder) and any(folder.glob("*.safetensors")):
        return "a checkpoint"
    return ""


def _is_step(name: str) -> bool:
    return STEP_NAME.fullmatch(finished_name(name) or name) is not None


def _said(folder: Path, kind: FolderKind) -> Path:
    if kind is FolderKind.CHECKPOINTS:
        steps = [path for path in folder.iterdir() if _is_step(path.name)]
        return max(steps, key=lambda path: int(path.name.split(".")[0].removeprefix("step-")))
    return folder / _NAMED[kind]
