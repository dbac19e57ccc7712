"""Decide which checkpoints of a run stay, and delete the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ..parallel_state import BadCheckpoint, BadInput
from ..storage.disk import DiskFailed
from ..storage.file_names import DAMAGED, set_aside_name
from ..storage.leftovers import remove_checkpoint
from ..storage.strict_json import shown
from .find import complete_checkpoints, step_of
from .hold import nobody_reads
from .manifest import Manifest


def check_same_tensors(root: Path, manifest: Manifest) -> None:
    """Refuse a folder with checkpoints of a model other than the manifest's.

    Retention would count them among this model's checkpoints, and delete them.
    """
    wanted = _tensors(manifest)
    for path in complete_checkpoints(root)[::-1] if root.is_dir() else []:
        try:
            there = _tensors(Manifest.load(path))
        except BadCheckpoint:
            continue
        if there != wanted:
            name = min(n for n in wanted.keys() | there.keys() if wanted.get(n) != there.get(n))
            expected = f"{name} of shape {wanted[name]}" if name in wanted else f"no {name}"
            raise BadInput(
                path,
                expected=f"a checkpoint of the same model as the one to be saved, with {expected}",
                found=f"one of shape {there[name]}" if name in there else "none",
                todo="Choose another folder",
            )
        return


def _tensors(manifest: Manifest) -> dict[str, list[int]]:
    """Return the weights' names, made safe for a message, and their shapes."""
    return {
        shown(name): [*one.shape]
        for name, one in manifest.tensors.items()
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

    A damaged one does not count and stays, and so does one that claims to be newer. One that is being read
    stays for now; these are returned.
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
        Manifest.load(path)
    except BadCheckpoint:
        return False
    return True


class Retention:
    """Delete the old checkpoints of a run in a thread, because nobody may wait for it: a large checkpoint has
    a file for each rank.

    Killed amid a deletion, the run leaves a folder that is no checkpoint; the next start clears it. ``said``
    is called, from the thread, with a line on what stays.
    """

    def __init__(self, root: Path, keep: int, said: Callable[[str], None]) -> None:
        self._root, self._keep, self._said = root, keep, said
        self._lock = threading.Lock()
        self._committed: int | None = None
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        """Begin to delete what is old now that ``step`` is committed; return at once."""
        with self._lock:
            self._committed = step
            if self._thread is not None and self._thread.is_alive():
                return  # it looks once more before it ends
            # Not a daemon: a program that just ends waits for it.
            self._thread = threading.Thread(target=self._work, name="retention")
            self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is left to delete, at most so many seconds."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._lock:
                step, self._committed = self._committed, None
                if step is None:
                    self._thread = None
                    return
            try:
                for path in delete_old(self._root, self._keep, step):
                    self._said(f"{path} stays until the next save: it is being read")
            except (OSError, BadInput, DiskFailed) as error:  # a failure to delete ends no run
                self._said(f"old checkpoints stay: {error}")
