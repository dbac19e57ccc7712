"""Find the folder of one step in what Megatron wrote, and tell its two formats apart."""

from __future__ import annotations

from pathlib import Path

from ...parallel_state import BadInput
from ...storage.safe_open import read_small
from ...storage.strict_json import shown
from ...system import whole_number

#: Megatron's file that names the newest step, in the folder that ``--save`` named.
TRACKER = "latest_checkpointed_iteration.txt"


def step_folder(path: Path) -> Path:
    """Return ``path`` itself or, if it holds Megatron's tracker file, the step's folder that this names."""
    if not (path / TRACKER).is_file():
        return path
    text = read_small(path / TRACKER, 64).decode("ascii", "replace").strip()
    step = whole_number(text)
    if text != "release" and step is None:
        raise BadInput(path / TRACKER, expected="the number of a step, or release", found=shown(text))
    folder = path / (text if text == "release" else f"iter_{step:07d}")
    if not folder.is_dir():
        missing = f"{folder.name}, which is not there"
        todo = "Name the folder of a step that is there"
        raise BadInput(path / TRACKER, expected=f"a step in {path}", found=missing, todo=todo)
    return folder
