"""Make the few system calls through which checkpoints reach the disk, and lock files and folders there.

All of them go through one small object, so that a test can record their order and replay every prefix. So the
promise "a crash leaves the old or the new checkpoint" is tested without cutting the power.

Locks are the operating system's (flock): one process at a time, no longer than it lives. A folder is locked
by many readers at once, against its deletion: a run with ``keep = 1`` deletes a checkpoint as soon as the
next one is committed. On a file system without such locks a reader may find files deleted.
"""

import errno
import fcntl
import os
import shutil
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from ..parallel_state import BadCheckpoint, MachineFailed
from ..system import refusal_of

#: Bytes of a call that writes. On a virtual machine 4 MB a call took six times the system's time of 1 MB, and
#: 128 KB up to twice as much.
_CALL = 1 << 20


class DiskFailed(MachineFailed):
    """Report that the disk refused a write: full, over quota, too large a file, an input/output error.

    If another place could be written to, the exit code is that of bad input.
    """


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Yield a descriptor, and close it when the block ends."""
    try:
        yield fd
    finally:
        os.close(fd)


class Disk:
    """Call the real disk."""

    def create(self, path: Path) -> int:
        """Open a new file for reading and writing and return its descriptor; an existing file is an error."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def reopen(self, path: Path) -> int:
        """Open an existing file for reading and writing and return its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        count = 0
        while count < len(data):
            count += os.pwrite(fd, data[count : count + _CALL], offset + count)

    def sync(self, fd: int) -> None:
        """Make the bytes written to the file so far survive a power cut."""
        os.fsync(fd)

    def sync_directory(self, path: Path) -> None:
        """Make the names in the directory survive a power cut."""
        with closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            os.fsync(fd)

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename in one atomic step; a file, or an empty directory, that has the new name is replaced."""
        os.rename(old, new)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a whole new file; it is on the disk when this returns."""
        with writing(path), closing(self.create(path)) as fd:
            self.write(fd, memoryview(data), 0)
            self.sync(fd)


def write_whole(path: Path, text: str) -> None:
    """Write a small file whole or not at all; a file of this name is replaced."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` of the ``with`` block into one line that names the file."""
    try:
        yield
    except OSError as error:
        refusal = refusal_of(error)
        reason = f"{refusal.reason}. {refusal.todo}" if refusal else f"{error}"
        failed = DiskFailed(f"{path}: cannot be written: {reason}")
        failed.exit_code = refusal.code if refusal else DiskFailed.exit_code
        raise failed from error


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file or folder; return whether it could be had. ``OSError`` where there are no locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class FileLock:
    """Hold a file that this process has locked, until ``release`` or the end of the process.

    A process that inherits the descriptor ``fd`` has the lock too.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd

    @classmethod
    def take(cls, path: Path) -> Self | None:
        """Make the file if there is none, and lock it; ``None`` where another process has it.

        ``OSError`` for a pipe or a device of that name.
        """
        while True:
            # O_NONBLOCK: opening a device of that name, such as a serial line, cannot make us wait.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            lock = cls(path, os.open(path, flags, 0o666))
            try:
                if not stat.S_ISREG(os.fstat(lock.fd).st_mode):
                    raise OSError(errno.ENXIO, "a pipe or a device", str(path))
                had = try_lock(lock.fd)
                if had and os.path.samestat(os.stat(path), os.fstat(lock.fd)):
                    return lock
            except FileNotFoundError:
                pass
            except BaseException:
                lock.release()
                raise
            lock.release()
            if not had:
                return None
            # Its holder removed the file between our two calls: that lock guards nothing any more.

    def release(self) -> None:
        """Give the lock up. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def remove(self) -> None:
        """Remove the file and give the lock up. A file that somebody wrote into is not ours and stays."""
        if self.fd >= 0 and not os.fstat(self.fd).st_size:
            self.path.unlink(missing_ok=True)
        self.release()


class Hold:
    """Keep retention away from a directory as long as this object lives, or until ``release``."""

    def __init__(self, fd: int) -> None:
        self._finalizer = weakref.finalize(self, os.close, fd)

    def release(self) -> None:
        """Release the directory now."""
        self._finalizer()


def hold(directory: Path) -> Hold:
    """Lock a directory against deletion; ``BadCheckpoint`` if it is being deleted or does not exist."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        words = {errno.ENOENT: "no such directory", errno.ENOTDIR: "a file"}
        reason = words.get(error.errno or 0, error.strerror or str(error))
        raise BadCheckpoint(directory, expected="a checkpoint", found=reason) from None
    lock = Hold(fd)
    with suppress(OSError):  # no such locks here
        if not try_lock(fd, shared=True):
            raise BadCheckpoint(directory, expected="a checkpoint", found="one that is being deleted")
    return lock


@contextmanager
def nobody_reads(directory: Path) -> Iterator[bool]:
    """Yield whether nobody holds the directory; if so, nobody else can hold it during the ``with`` block."""
    with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        free = True
        with suppress(OSError):
            free = try_lock(fd)
        yield free
