"""Make the few system calls through which checkpoints reach the disk.

All of them go through one small object, so that a test can record their order and replay every prefix. So the
promise "a crash leaves the old or the new checkpoint" is tested without cutting the power.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..parallel_state import MachineFailed
from ..system import refusal_of


class DiskFailed(MachineFailed):
    """Report that the disk refused a write: full, over quota, too large a file, an input/output error.

    If another place could be written to, the exit code is that of bad input.
    """


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
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)

    def sync(self, fd: int) -> None:
        """Make the bytes written to the file so far survive a power cut."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_directory(self, path: Path) -> None:
        """Make the names in the directory survive a power cut."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_directory(self, path: Path) -> None:
        os.mkdir(path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename in one atomic step; a file, or an empty directory, that has the new name is replaced."""
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a whole new file; it is on the disk when this returns."""
        with writing(path):
            fd = self.create(path)
            try:
                self.write(fd, memoryview(data), 0)
                self.sync(fd)
            finally:
                self.close(fd)


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
