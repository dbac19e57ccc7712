"""Decide which checkpoints of a run stay, and delete the others."""

from __future__ import annotations

from pathlib import Path

from ..parallel_state import BadCheckpoint, BadInput
from ..storage.file_names import DAMAGED, set_aside_name
from ..storage.leftovers import remove_checkpoint
from ..storage.strict_json import shown
from .find import complete_checkpoints, step_of
from .manifest import Manifest
from .reading_lock import nobody_reads


def check_same_tensors(root: Path, manifest: Manifest) -> None:
    """Refuse a folder with checkpoints of a model other than the manifest's.

    Retention would count them among this model's checkpoints, and delete them.
    """
    for path in complete_checkpoints(root)[::-1] if root.is_dir() else []:
        try:
            other = Manifest.load(path, whole=False)
        except BadCheckpoint:
            continue
        check_same_model(path, other, manifest)
        return


def check_same_model(where: object, other: Manifest, manifest: Manifest) -> None:
    """Refuse a place that holds a checkpoint of a model other than the manifest's."""
    wanted, there = _tensors(manifest), _tensors(other)
    if there != wanted:
        name = min(n for n in wanted.keys() | there.keys() if wanted.get(n) != there.get(n))
        expected = f"{name} of shape {wanted[name]}" if name in wanted else f"no {name}"
        raise BadInput(
            where,
            expected=f"a checkpoint of the same model as the one to be saved, with {expected}",
            found=f"one of shape {there[name]}" if name in there else "none",
            todo="Choose another folder",
        )


def _tensors(manifest: Manifest) -> dict[str, list[int]]:
    """Return the weights' names, made safe for a message, and their shapes."""
    return {
        shown(name): [*tensor.shape]
        for name, tensor in manifest.tensors.items()
        if not name.startswith("optimizer.")
    }


def set_aside(target: Path) -> None:
    """Rename a damaged checkpoint of this step, so that the step can be saved again.

    A resume passed it over.
    """
    if not target.is_dir() or not any(target.iterdir()):
        return
    try:
        Manifest.load(target)
    except BadCheckpoint:
        target.rename(set_aside_name(target, DAMAGED))


def delete_old(root: Path, keep: int, step: int) -> list[Path]:
    """Delete the good checkpoints up to ``step``, just committed, except the newest ``keep``.

    One whose manifest is damaged does not count and stays, and so does one that claims to be newer. One that
    is being read stays for now; these are returned. Other files than manifests are not looked at: this is
    done at each save, and a checkpoint has a file of each rank.
    """
    good = [path for path in complete_checkpoints(root) if step_of(path) <= step and _is_good(path)]
    read = []
    for old in good[:-keep]:
        with nobody_reads(old) as free:
            if free:
                remove_checkpoint(old)
            else:
                read.append(old)
    return read


def _is_good(path: Path) -> bool:
    try:
        Manifest.load(path, whole=False)
    except BadCheckpoint:
        return False
    return True
