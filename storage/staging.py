"""Write an output into a directory beside its final place, and give it its name only when it is complete.

    with staged(output, inputs=[source], need=bytes) as staging:   # checks, lock, a fresh directory beside it
        ...                                                        # files written and synced into .directory
        staging.publish(manifest)                                  # manifest last, sync, rename, sync

An output of several files beside each other (``publish_files``) is complete when the last of them has its
name; ``output_file`` is for one file. A kill leaves it absent or whole; a later run clears the rest.
"""

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self

from ..parallel_state import BadInput, fault
from .disk import Disk, DiskFailed, FileLock, writing
from .file_names import MANIFEST, leftovers, unfinished
from .output_places import IsOurs, check_free, check_output, check_output_file, lock_output, make_folder
from .safe_open import read_small

_IDENTITY = re.compile(r"[0-9a-f]{16}")


class Staging:
    """Hold an unfinished output, owned by one process. Others may write into ``directory`` too."""

    def __init__(self, output: Path, directory: Path, lock: FileLock):
        self.output, self.directory = output, directory
        #: Whether a killed run of the same identity left files in ``directory``.
        self.goes_on = False
        self._lock = lock

    @classmethod
    def begin(
        cls, output: Path, check: Callable[[], None] | None = None, *, identity: str | None = None
    ) -> Self:
        """Lock an output, and make the directory to write into.

        ``check`` refuses names that are taken; without it the output is a directory, for which
        ``check_output`` was called. ``identity``, 16 hexadecimal digits, names the directory (a conversion
        gives the hash of its plan); if it is there, left by a run that was killed, it is taken up as it is.
        """
        identity = secrets.token_hex(8) if identity is None else identity
        assert _IDENTITY.fullmatch(identity), identity
        if check is not None:
            check()
        with writing(output.parent):
            make_folder(output.parent)
        directory = unfinished(output, identity)
        staging = cls(output, directory, lock_output(output))
        try:
            (check or partial(check_free, output))()  # once more: another process may have finished since
            with writing(directory):
                for path in leftovers(output):  # we have the lock, so nobody is writing there
                    if path != directory:
                        Disk().remove_tree(path)
                staging.goes_on = directory.exists()
                if not staging.goes_on:
                    Disk().make_directory(directory)
        except BaseException:
            staging.leave()
            raise
        return staging

    def publish(self, manifest: bytes | None = None) -> None:
        """Give the directory its name; when this returns, a power cut cannot take it back.

        Every file in it must be on the disk by now. ``manifest`` is written last of all (a checkpoint's is
        one that a reader accepts: ``Manifest.accepted_bytes``).
        """
        disk = Disk()
        if manifest is not None:
            fresh = self.directory / f"{MANIFEST}.tmp"
            disk.write_file(fresh, manifest)
            if read_small(fresh, len(manifest)) != manifest:
                raise DiskFailed(f"{fresh}: what was written cannot be read back")
            _rename(fresh, self.directory / MANIFEST)
        with writing(self.directory):
            disk.sync_directory(self.directory)
        fault("commit.before_rename", rank=0)
        try:
            disk.rename(self.directory, self.output)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise BadInput(self.output, expected="permission to rename", found="none") from None
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                intruders = "files that appeared while it was being written"
                raise BadInput(self.output, expected="a new or empty directory", found=intruders) from None
            with writing(self.output):
                raise
        fault("commit.after_rename", rank=0)
        self._sync_names()
        self._lock.remove()

    def publish_files(self, places: Mapping[str, Path]) -> None:
        """Give each file of the directory its place, in this order: the output is complete with the last.

        When this returns, a power cut cannot take it back. Every file must be on the disk by now. An error
        before the last file has its place leaves none of them.
        """
        *others, last = places
        try:
            for name in others:
                _rename(self.directory / name, places[name])
            self._sync_names()
            _rename(self.directory / last, places[last])
        except BaseException:
            if not places[last].exists():
                for name in others:
                    places[name].unlink(missing_ok=True)
            raise
        self._sync_names()
        Disk().remove_tree(self.directory)
        self._lock.remove()

    def _sync_names(self) -> None:
        with writing(self.output.parent):
            Disk().sync_directory(self.output.parent)

    def abandon(self) -> None:
        """Remove what was written and give up the lock; folders made around the output stay. What cannot be
        removed keeps its telling name. Does nothing after ``publish``.
        """
        if self._lock.fd >= 0:
            Disk().remove_tree(self.directory)
            self.leave()

    def leave(self) -> None:
        """Give up the lock and keep what was written, for a later run of the same identity."""
        self._lock.remove()


def _rename(path: Path, place: Path) -> None:
    with writing(place):
        Disk().rename(path, place)


@contextmanager
def staged(
    output: Path | str,
    *,
    inputs: Iterable[Path] = (),
    need: int = 0,
    identity: str | None = None,
    apart: bool = False,
) -> Iterator[Staging]:
    """Call ``check_output`` and run ``Staging.begin`` as a context: an error that leaves it before
    ``publish`` leaves at most empty folders around the output.

    With an ``identity`` an interrupt (Ctrl-C) keeps the files, as a kill does, to go on from.
    """
    output = Path(output)
    check_output(output, inputs=inputs, need=need, apart=apart)
    staging = Staging.begin(output, identity=identity)
    try:
        yield staging
    except KeyboardInterrupt:
        if identity is not None:
            staging.leave()
        raise
    finally:
        staging.abandon()


@contextmanager
def output_file(
    out: Path,
    *,
    ours: IsOurs | None = None,
    force: bool = False,
    inputs: Iterable[Path] = (),
    parents: bool = False,
) -> Iterator[Path]:
    """Yield the path of an empty file; it gets the name ``out`` when the block ends without an error.

    ``BadInput`` as in ``check_output_file``, for a file that appears, and where another process writes.
    """
    inputs = [*inputs]

    def check() -> None:
        check_output_file(out, ours=ours, force=force, inputs=inputs, parents=parents)

    staging = Staging.begin(out, check)
    path = staging.directory / out.name
    try:
        with writing(out):
            path.touch()
            yield path
            with open(path, "rb") as file:  # a library may have made the file anew
                os.fsync(file.fileno())
            try:
                os.link(path, out)  # unlike a rename, never over a file that appeared meanwhile
            except OSError:  # it exists, or this file system has no hard links
                check()
                os.replace(path, out)
            Disk().sync_directory(out.parent)
    finally:
        staging.abandon()
