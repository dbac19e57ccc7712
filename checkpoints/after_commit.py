"""Copy a committed checkpoint to a mirror and delete old checkpoints, while the run goes on.

Rank 0 does both in threads, because no rank should wait for thousands of files or for a network.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from ..parallel_state import BadCheckpoint, BadInput, MachineFailed
from ..storage.disk import Hold, hold, nobody_reads
from ..storage.file_names import set_aside_name
from ..storage.leftovers import remove_checkpoint
from .find import complete_checkpoints, good_manifests, step_directory, step_of
from .manifest import Manifest
from .mirror import Mirror

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

    def resume(self) -> None:
        """Begin to copy the newest checkpoint, in case the run was killed between its commit and its copy."""
        for path in complete_checkpoints(self._root)[-1:]:
            self._begin_copy(path)

    def begin(self, step: int) -> None:
        """Begin to copy the checkpoint of ``step``, just committed, and to delete old ones, in threads."""
        self._committed = step
        self._begin_copy(step_directory(self._root, step))
        self._retention.begin(step)

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
            for path in delete_old(self._root, self._keep, step):
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


def delete_old(root: Path, keep: int, step: int) -> list[Path]:
    """Delete the good checkpoints up to ``step``, just committed, except the newest ``keep``.

    One whose manifest is damaged does not count and stays, and so does one that claims to be newer. One that
    is being read stays for now; these are returned.
    """
    good = [path for path, _ in good_manifests(root) if step_of(path) <= step]
    read = []
    for old in reversed(good[keep:]):
        with nobody_reads(old) as free:
            if free:
                remove_checkpoint(old)
            else:
                read.append(old)
    return read
