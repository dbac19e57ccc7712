"""Copy the committed checkpoints of a run to a second place, and the newest one back; delete old checkpoints.

The second place is a folder, or an object store that fsspec knows. An object store has no rename, so the
manifest is written last: a folder without a manifest is not a checkpoint. When a copy is deleted, its
manifest is deleted first. While the run goes on, rank 0 copies and deletes in threads, because no rank should
wait for thousands of files or for a network.
"""

import os
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from ..parallel_state import BadCheckpoint, BadInput, MachineFailed, ParallelState, require
from ..parallel_state.collective_errors import together
from ..storage.disk import Hold, hold, nobody_reads
from ..storage.file_names import MANIFEST, set_aside_name
from ..storage.output_places import check_outside, remove_checkpoint
from ..storage.remote_folder import RemoteFolder
from ..storage.safe_open import read_small
from ..storage.staging import staged
from .find import complete_checkpoints, first_whole, good_manifests, step_of, steps_at, whole_copy
from .manifest import MAX_BYTES, Manifest
from .manifest_checks import check_same_model
from .verify import check_crc

_TRIAL = "trial.tmp"
_TODO = "Give each run a place of its own; to go on from that checkpoint, set checkpoint.restore=true"


def check_apart(folder: RemoteFolder, root: Path) -> None:
    """Refuse a mirror that is ``root``, a run's folder of checkpoints, or lies inside it or around it."""
    if folder.local is None:
        return
    check_outside(folder.local, [root])
    place, run = (Path(os.path.realpath(path)) for path in (folder.local, root))
    inside = run in (place, *place.parents)  # check_outside sees no folder that is not there yet
    if inside or place in run.parents:
        actual = "one in it" if inside else "one around it"
        raise BadInput(folder.url, expected="a place outside the run's folder", found=actual)


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
        check_apart(self.folder, root)
        url = self.folder.url
        new = not complete_checkpoints(root)
        for name in steps_at(self.folder):
            require(not new, url, None, "no checkpoints", name, _TODO)
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
        is_copied = self.folder.read(f"{name}/{MANIFEST}") == raw and self._good(name) is not None
        if not is_copied:
            self._remove(name)
            for file in (*manifest.files, *manifest.companions):
                path = directory / file.name
                check_crc(path, file, self.folder.copy(path, f"{name}/{file.name}"))
            self.folder.sync(name)
            self.folder.write(f"{name}/{MANIFEST}", raw)
            self.folder.sync(name)
            self.folder.sync()
        self._retain(step)
        return None if is_copied else f"{self.folder.url}/{name}"

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
    """Copy the newest checkpoint of a mirror into ``root``, unless rank 0 finds one there. Collective.

    Rank 0 copies. ``say`` gets a line about what was found; see ``Mirror.restore``.
    """

    def work() -> list[str]:
        if state.rank or complete_checkpoints(root):
            return []
        path, messages = Mirror(RemoteFolder(url), keep=1).restore(root)
        return [*messages, f"no checkpoint in {url}" if path is None else f"restored {path} from {url}"]

    for line in together(work, state)[0]:
        say(line)


T = TypeVar("T")


class LatestOnly(ThreadPoolExecutor, Generic[T]):
    """Call ``work`` in a thread with the latest of what is given to ``begin``.

    What is given while the thread works must wait, and only the latest of it is used. ``work`` must not
    raise. A program that just ends waits for it.
    """

    def __init__(self, name: str, work: Callable[[T], None]) -> None:
        super().__init__(1, name)
        self._work = work
        self._waiting = deque[T](maxlen=1)
        self._last: Future[None] | None = None

    def begin(self, latest: T) -> None:
        """Begin the work on this; if the thread is busy, let it be the next. Returns at once."""
        self._waiting.append(latest)
        self._last = self.submit(self._run)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is left to do, at most this many seconds."""
        if self._last is not None:
            wait([self._last], timeout)

    def _run(self) -> None:
        while self._waiting:  # unless the call before took it
            self._work(self._waiting.pop())


class AfterCommit:
    """Keep the newest ``keep`` checkpoints in ``root``, and copies of them in a mirror if there is one.

    An error here does not end the run: ``say`` is called, from a thread, with a line about the error, and
    the next commit tries again. If the run is killed meanwhile, a folder may be left that is not a
    checkpoint. No reader takes it for one, and the next start deletes it.
    """

    def __init__(self, root: Path, keep: int, say: Callable[[str], None]) -> None:
        self._root, self._keep, self._say = root, keep, say
        self.mirror: Mirror | None = None
        self._retention = LatestOnly("retention", self._retain)
        self._copying = LatestOnly("mirror", self._copy)
        self._committed: int | None = None
        #: Checkpoints that lack a file, although their manifest is good: they do not count as kept.
        self._damaged: set[Path] = set()
        self._older: list[Path] = []

    def resume(self, start: int | None) -> None:
        """Begin to copy the newest checkpoint, in case the run was killed between its commit and its copy.

        A run that goes on from step ``start`` has passed over newer ones: something in them is missing.
        """
        complete = complete_checkpoints(self._root)
        if start is not None:
            self._damaged = {path for path in complete if step_of(path) > start}
            self._older = [path for path in complete if step_of(path) < start]
        for path in [path for path in complete if path not in self._damaged][-1:]:
            self._begin_copy(path)

    def begin(self, committed: Path) -> None:
        """Begin to copy a checkpoint, just committed, and to delete old ones, in threads."""
        self._committed = step_of(committed)
        self._damaged.discard(committed)  # written anew
        self._begin_copy(committed)
        self._retention.begin(self._committed)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is left to do, some seconds for each thread at most."""
        self._copying.wait(timeout)
        if self.mirror is not None and self._committed is not None:
            self._retention.begin(self._committed)  # of what was held while it was copied
        self._retention.wait(timeout)

    def close(self, *, wait: bool) -> None:
        """End both threads when nothing is left to do; ``wait`` until then."""
        self._copying.shutdown(wait=wait)
        self._retention.shutdown(wait=wait)

    def _begin_copy(self, path: Path) -> None:
        if self.mirror is not None:
            with suppress(BadCheckpoint):  # somebody deletes it
                self._copying.begin((path, hold(path)))  # held, so that it is not deleted meanwhile

    def _retain(self, step: int) -> None:
        try:
            while self._older:
                try:
                    Manifest.load(path := self._older.pop())
                except BadCheckpoint:
                    self._damaged.add(path)
            for path in delete_old(self._root, self._keep, step, self._damaged):
                self._say(f"{path} stays until the next save: it is being read")
        except (OSError, BadInput, MachineFailed) as error:
            self._say(f"old checkpoints stay: {error}")

    def _copy(self, path_and_hold: tuple[Path, Hold]) -> None:
        assert self.mirror is not None
        try:
            if (url := self.mirror.copy(path_and_hold[0])) is not None:
                self._say(f"MIRRORED {url}")
        except (OSError, BadInput, MachineFailed) as error:
            self._say(f"step {step_of(path_and_hold[0])} is not in the mirror: {error}")
        finally:
            # Now: errors that a store keeps refer to this frame, and so to what it holds.
            path_and_hold[1].release()


def set_aside(target: Path) -> None:
    """Rename a damaged checkpoint of this step, so that the step can be saved again.

    A resume passed it over.
    """
    if not target.is_dir() or not any(target.iterdir()):
        return
    try:
        Manifest.load(target)
    except BadCheckpoint:
        target.rename(set_aside_name(target))


def delete_old(root: Path, keep: int, step: int, damaged: Collection[Path] = ()) -> list[Path]:
    """Delete the good checkpoints up to ``step``, just committed, except the newest ``keep``.

    One that is ``damaged``, or whose manifest is, does not count and stays, and so does one that claims to be
    newer. One that is being read stays for now; these are returned.
    """
    good = [path for path, _ in good_manifests(root) if step_of(path) <= step and path not in damaged]
    read = []
    for old in reversed(good[keep:]):
        with nobody_reads(old) as free:
            if free:
                remove_checkpoint(old)
            else:
                read.append(old)
    return read
