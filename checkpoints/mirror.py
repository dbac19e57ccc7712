"""Copy the committed checkpoints of a run to a second place, and the newest one back.

The second place is a folder, or an object store that fsspec knows.

An object store has no rename, so the manifest is written last: a folder without a manifest is not a
checkpoint. When a copy is deleted, its manifest is deleted first.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..parallel_state import BadCheckpoint, BadInput, ParallelState
from ..parallel_state.collective_errors import together
from ..storage.file_names import MANIFEST
from ..storage.output_places import check_outside
from ..storage.remote_folder import RemoteFolder
from ..storage.safe_open import read_small
from ..storage.staging import staged
from .find import complete_checkpoints, damaged, first_whole, step_of, steps_at, whole_copy
from .manifest import MAX_BYTES, Manifest
from .manifest_checks import check_same_model

_TRIAL = "trial.tmp"
_TODO = "Give each run a place of its own; to go on from that checkpoint, set checkpoint.restore=true"


class Mirror:
    """Keep copies of the newest ``keep`` checkpoints of a run in ``folder``.

    Only one process may write there. If it is killed, at any point, the folder holds complete copies, and
    perhaps folders that are not checkpoints, which the next copy deletes.
    """

    def __init__(self, folder: RemoteFolder, keep: int) -> None:
        self.folder, self._keep = folder, keep

    def check(self, root: Path, manifest: Manifest) -> None:
        """Refuse an unfit place, before the run begins; raises ``BadInput``.

        A place is unfit if it is inside ``root`` or contains it, if it cannot be written to,
        if it has a whole copy of another model, or if it has any checkpoint while ``root`` has none.
        """
        url, local = self.folder.url, self.folder.local
        if local is not None:
            check_outside(local, [root])
            place, run = (Path(os.path.realpath(each)) for each in (local, root))
            inside = run in (place, *place.parents)  # check_outside sees no folder that is not there yet
            if inside or place in run.parents:
                actual = "one in it" if inside else "one around it"
                raise BadInput(url, expected="a place outside the run's folder", found=actual)
        new = not complete_checkpoints(root)
        for name in steps_at(self.folder):
            if new:
                raise BadInput(url, expected="no checkpoints", found=name, todo=_TODO)
            if (other := self._good(name)) is not None:
                check_same_model(f"{url}/{name}", other, manifest)
        self.folder.write(_TRIAL, b"trilith")
        self.folder.remove(_TRIAL)

    def copy(self, directory: Path) -> str | None:
        """Copy a committed checkpoint, then delete copies older than the newest ``keep``.

        Returns its URL, or ``None`` if the copy was there already. Raises ``BadCheckpoint`` for a checkpoint
        that is damaged (nothing of it then counts as copied), and ``RemoteFailed``.
        """
        step, raw = step_of(directory), read_small(directory / MANIFEST, MAX_BYTES, kind=BadCheckpoint)
        name, manifest = directory.name, Manifest.parse(raw, directory / MANIFEST)
        there = self.folder.read(f"{name}/{MANIFEST}") == raw and self._good(name) is not None
        if not there:
            self._remove(name)
            for file in (*manifest.files, *manifest.companions):
                crc = self.folder.copy(where := directory / file.name, f"{name}/{file.name}")
                if crc != file.crc32:
                    raise damaged(where, "CRC-32", expected=f"{file.crc32:08x}", found=f"{crc:08x}")
            self.folder.sync(name)
            self.folder.write(f"{name}/{MANIFEST}", raw)
            self.folder.sync(name)
            self.folder.sync()
        self._retain(step)
        return None if there else f"{self.folder.url}/{name}"

    def restore(self, root: Path) -> tuple[Path | None, list[str]]:
        """Copy the newest whole copy into ``root``, a run's folder of checkpoints that has none.

        Returns the new checkpoint (``None`` if the mirror has no whole copy), and a line about each newer
        copy that is damaged, which ``STRICT`` refuses. Every byte is compared with its checksum. If the
        process is killed, at any point, ``root`` has the whole checkpoint or none. Raises ``RemoteFailed``,
        and ``BadInput`` if the disk is too small.
        """

        def attempt(name: str) -> Path:
            raw, manifest = self.folder.read(f"{name}/{MANIFEST}"), whole_copy(self.folder, name)
            files = (*manifest.files, *manifest.companions)
            manifest.check_place(root / name)
            with staged(root / name, need=sum(file.size for file in files)) as staging:
                for file in files:
                    crc = self.folder.fetch(f"{name}/{file.name}", staging.directory / file.name)
                    if crc != file.crc32:
                        where = f"{self.folder.url}/{name}/{file.name}"
                        raise BadCheckpoint(where, "CRC-32", expected=f"{file.crc32:08x}", found=f"{crc:08x}")
                staging.publish(raw)
            return root / name

        _, path, lines = first_whole(steps_at(self.folder), attempt)
        return path, lines

    def _retain(self, step: int) -> None:
        """Delete old copies, and folders up to ``step`` that never became one. What is damaged stays."""
        names = [name for name in steps_at(self.folder) if step_of(name) <= step]
        for name in names:
            if MANIFEST not in self.folder.sizes(name):
                self._remove(name)
        good = [name for name in names if self._good(name) is not None]
        for name in reversed(good[self._keep :]):
            self._remove(name)

    def _remove(self, name: str) -> None:
        """Remove a copy: first what makes it a checkpoint."""
        self.folder.remove(f"{name}/{MANIFEST}")
        self.folder.remove(name)

    def _good(self, name: str) -> Manifest | None:
        """Return the manifest of a copy whose files are all there, with their sizes."""
        with suppress(BadCheckpoint):
            return whole_copy(self.folder, name)
        return None


def restore_if_none(
    url: str, root: Path, state: ParallelState, *, say: Callable[[str], None] = lambda line: None
) -> None:
    """Copy the newest checkpoint of a mirror into ``root``, unless ``root`` has a checkpoint. Collective.

    Rank 0 copies. ``say`` gets a line about what was found; see ``Mirror.restore``.
    """

    def work() -> list[str]:
        if state.rank or complete_checkpoints(root):
            return []
        path, messages = Mirror(RemoteFolder(url), keep=1).restore(root)
        return [*messages, f"no checkpoint in {url}" if path is None else f"restored {path} from {url}"]

    for line in together(work, state)[0]:
        say(line)
