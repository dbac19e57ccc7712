"""Name the files and folders that tell a folder's kind: a checkpoint, a run, a Hugging Face folder."""

import os
import re
from itertools import count
from pathlib import Path

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
CONFIG = "config.json"
#: PEFT's names of the same, for adapters.
ADAPTER_MODEL, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
#: The index of a checkpoint of ``torch.distributed.checkpoint``.
DCP_METADATA = ".metadata"

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


def set_aside_name(path: Path, suffix: str) -> Path:
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
    if not output.parent.is_dir():
        return []
    return [path for path in output.parent.iterdir() if finished_name(path.name) == name]
