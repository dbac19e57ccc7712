"""How an output directory comes to be: beside its final place, complete, and then under its name in one step.

    staging = Staging.begin(output, inputs=[source], need=bytes)   # checks, lock, a fresh directory beside it
    ...                                                            # files written and synced into .directory
    staging.publish(manifest)                                      # manifest last, sync, rename, sync

Killed at any point, the output is absent or whole; a later run clears what an earlier one left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..parallel_state import BadInput, fault
from .disk import Disk, DiskFailed, writing
from .file_names import MANIFEST
from .output_file import check_outside
from .parents import make_parents, remove_empty
from .regular import open_regular

_SPARE = 1.1
_LONGEST_NAME = 255
_LOCK = ".lock"
_IDENTITY = re.compile(r"[0-9a-f]{16}")


def check_output(output: Path, *, inputs: Iterable[Path] = (), need: int = 0) -> None:
    """Refuse an output that cannot be: occupied, an input, not writable, or too small for ``need`` bytes.

    Nothing is created; of an occupied output the lock is removed that a killed run left beside it.
    """
    check_outside(output, inputs)
    if len(os.fsencode(output.name)) > _LONGEST_NAME:
        raise BadInput(output, expected=f"a name of at most {_LONGEST_NAME} bytes", found="a longer one")
    if output.is_symlink():
        raise BadInput(output, expected="a new directory", found="a link", todo="Name its target instead")
    if output.exists():
        if not output.is_dir():
            raise BadInput(output, expected="a new directory", found="a file", todo="Choose another name")
        if any(output.iterdir()):
            _remove_dead_lock(output)
            todo = "Choose another name or remove it first"
            raise BadInput(
                output, expected="a new or empty directory", found="one with files in it", todo=todo
            )
    space = os.statvfs(check_home(output))
    free = space.f_bavail * space.f_frsize
    need -= _held_by_leftovers(output)
    if need * _SPARE > free:
        expected = f"{need * _SPARE / 1e9:,.1f} GB free ({need / 1e9:,.1f} GB and a tenth)"
        raise BadInput(output, expected=expected, found=f"{free / 1e9:,.1f} GB")


def check_home(output: Path) -> Path:
    """The folder that is there already in which the output, or folders around it, will be made; refused if it
    is a file or cannot be written to.
    """
    for home in Path(os.path.abspath(output)).parents:
        if home.exists():
            break
        if home.is_symlink():
            raise BadInput(
                home, expected="a directory", found=f"a link to {os.readlink(home)}, which is absent"
            )
    if not home.is_dir():
        raise BadInput(home, expected="a directory", found="a file", todo="Choose another name")
    if not os.access(home, os.W_OK | os.X_OK):
        raise BadInput(home, expected="a directory that we may write to", found="no permission to")
    return home


class Staging:
    """An output in the making, held by one process. Others may write into ``directory`` too."""

    def __init__(self, output: Path, directory: Path, lock: int, disk: Disk, made: list[Path]):
        self.output, self.directory = output, directory
        self._lock, self._disk, self._made = lock, disk, made

    @classmethod
    def begin(
        cls,
        output: Path | str,
        *,
        inputs: Iterable[Path] = (),
        need: int = 0,
        identity: str | None = None,
        disk: Disk | None = None,
    ) -> Staging:
        """Check the output, lock it against other processes, and make the directory to write into.

        ``identity``, 16 hexadecimal digits, names that directory (a conversion gives the hash of its plan);
        if it is there, left by a run that was killed, it is taken up as it is.
        """
        output, disk = Path(output), disk or Disk()
        identity = secrets.token_hex(8) if identity is None else identity
        assert _IDENTITY.fullmatch(identity), identity
        check_output(output, inputs=inputs, need=need)
        with writing(output.parent):
            made = make_parents(output.parent, disk)
        lock = _lock(output)
        directory = _beside(output, f".tmp-{identity}")
        try:
            with writing(directory):
                _remove_leftovers(output, disk, but=directory)
                if not directory.exists():
                    disk.make_directory(directory)
        except BaseException:
            _unlock(output, lock)
            remove_empty(made)
            raise
        return cls(output, directory, lock, disk, made)

    def publish(self, manifest: bytes | None = None) -> None:
        """Give the directory its name; when this returns, a power cut cannot take it back.

        Every file in it must be on the disk by now. ``manifest`` is written last of all (a checkpoint's is
        one that a reader accepts: ``Manifest.accepted_bytes``).
        """
        if manifest is not None:
            fresh = self.directory / f"{MANIFEST}.tmp"
            self._disk.write_file(fresh, manifest)
            self._read_back(fresh, manifest)
            with writing(self.directory / MANIFEST):
                self._disk.rename(fresh, self.directory / MANIFEST)
        with writing(self.directory):
            self._disk.sync_directory(self.directory)
        fault("commit.before_rename", rank=0)
        try:
            self._disk.rename(self.directory, self.output)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise BadInput(self.output, expected="permission to rename", found="none") from None
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                found = "files that appeared while it was being written"
                raise BadInput(self.output, expected="a new or empty directory", found=found) from None
            with writing(self.output):
                raise
        fault("commit.after_rename", rank=0)
        with writing(self.output.parent):
            self._disk.sync_directory(self.output.parent)
        self._release()

    def _read_back(self, path: Path, manifest: bytes) -> None:
        """Refuse to commit unless the disk gives back what was written."""
        with open_regular(path) as (fd, _):
            if os.pread(fd, len(manifest) + 1, 0) != manifest:
                raise DiskFailed(f"{path}: what was written cannot be read back")

    def abandon(self) -> None:
        """Remove what was written, folders made for it included, and give up the lock. What cannot be removed
        keeps its telling name.
        """
        if self._lock >= 0:
            self._disk.remove_tree(self.directory)
            self._release()
            remove_empty(self._made)

    def leave(self) -> None:
        """Give up the lock and keep what was written, for a later run of the same identity."""
        if self._lock >= 0:
            self._release()

    def _release(self) -> None:
        _unlock(self.output, self._lock)
        self._lock = -1


@contextmanager
def staged(
    output: Path | str,
    *,
    inputs: Iterable[Path] = (),
    need: int = 0,
    identity: str | None = None,
    disk: Disk | None = None,
) -> Iterator[Staging]:
    """``Staging.begin`` as a block: an error that leaves it before ``publish`` leaves nothing behind.

    With an ``identity`` an interrupt (Ctrl-C) keeps what was written, as a kill does, to be taken up again.
    """
    staging = Staging.begin(output, inputs=inputs, need=need, identity=identity, disk=disk)
    try:
        yield staging
    except KeyboardInterrupt:
        if identity is not None:
            staging.leave()
        raise
    finally:
        staging.abandon()


def remove_checkpoint(directory: Path, disk: Disk | None = None) -> None:
    """Delete a checkpoint. It loses its name first: killed half way, what is left is no checkpoint, and
    ``clear_unfinished`` removes it.
    """
    disk = disk or Disk()
    unnamed = _beside(directory, f".tmp-{secrets.token_hex(8)}")
    with writing(directory):
        disk.rename(directory, unnamed)
        disk.sync_directory(directory.parent)
    fault("commit.amid_removal", rank=0)
    disk.remove_tree(unnamed)


def clear_unfinished(root: Path, disk: Disk | None = None) -> None:
    """Remove what killed runs left under ``root``, of whatever output, unless somebody is writing it now."""
    for path in [*root.iterdir()] if root.is_dir() else []:
        name, _, identity = path.name.rpartition(".tmp-")
        # A lock alone is of a run that was killed before it made more, or after all was done.
        alone = path.name.endswith(_LOCK) and path.is_file() and not path.stat().st_size
        if not alone and not (name and _IDENTITY.fullmatch(identity)):
            continue
        output = root / (path.name.removesuffix(_LOCK) if alone else name)
        try:
            lock = _lock(output)
        except BadInput:
            continue
        if not alone:
            (disk or Disk()).remove_tree(path)
        _unlock(output, lock)


def _beside(output: Path, suffix: str) -> Path:
    """A sibling of the output, its name cut where the file system would refuse it."""
    room = _LONGEST_NAME - len(suffix)
    return output.parent / (os.fsencode(output.name)[:room].decode(errors="ignore") + suffix)


def _remove_leftovers(output: Path, disk: Disk, *, but: Path) -> None:
    """What killed runs left for this output; we hold its lock, so nobody is writing there."""
    for path in _leftovers(output):
        if path != but:
            disk.remove_tree(path)


def _held_by_leftovers(output: Path) -> int:
    """Bytes on the disk of what killed runs left for this output: taken up again, or removed first."""
    return sum(
        path.stat().st_blocks * 512
        for left in _leftovers(output)
        for path in left.rglob("*")
        if path.is_file()
    )


def _leftovers(output: Path) -> list[Path]:
    prefix = _beside(output, ".tmp-" + "0" * 16).name[:-16]
    if not output.parent.is_dir():
        return []
    return [
        path
        for path in output.parent.iterdir()
        if path.name.startswith(prefix) and _IDENTITY.fullmatch(path.name[len(prefix) :])
    ]


def _lock(output: Path) -> int:
    """An exclusive lock that the system gives up for us if we die, so a killed run blocks nobody."""
    path = _beside(output, _LOCK)
    while True:
        with writing(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            found, todo = "another process writing it", "Wait for it, or choose another output"
            raise BadInput(output, expected="an output of our own", found=found, todo=todo) from None
        try:
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)  # its holder removed it between our two calls: that lock guards nothing any more


def _remove_dead_lock(output: Path) -> None:
    """Remove the lock of a run that was killed when its output had its name already."""
    path = _beside(output, _LOCK)
    with suppress(OSError, BadInput):  # it is held, or not ours to remove
        if stat.S_ISREG((found := path.lstat()).st_mode) and not found.st_size:
            _unlock(output, _lock(output))


def _unlock(output: Path, lock: int) -> None:
    _beside(output, _LOCK).unlink(missing_ok=True)
    os.close(lock)
