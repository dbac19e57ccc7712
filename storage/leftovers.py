"""Remove what killed runs left beside an output; take an output's lock; delete a checkpoint safely."""

import os
import re
import secrets
import time
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from ..parallel_state import BadInput, fault
from .disk import Disk, DiskFailed, FileLock, closing, try_lock, writing
from .file_names import beside, finished_name, leftovers, unfinished

#: In the name of a lock, as in all that is left beside an output: nobody's own file is called so.
_LOCK = ".tmp-lock"
_LEFT = re.compile(r"\.tmp-(lock|[0-9a-f]{16})$")


def remove_checkpoint(directory: Path) -> None:
    """Delete a checkpoint, first its name: what a kill leaves is none; ``clear_unfinished`` removes it."""
    disk, unnamed = Disk(), unfinished(directory, secrets.token_hex(8))
    with writing(directory):
        disk.rename(directory, unnamed)
        disk.sync_directory(directory.parent)
    fault("commit.amid_removal", rank=0)
    disk.remove_tree(unnamed)


def clear_unfinished(root: Path) -> None:
    """Remove what killed runs left under ``root``, of whatever output, unless somebody is writing it now."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    # A lock alone is of a run that was killed before it made more, or after all was done.
    output_names = {finished_name(name) or name.removesuffix(_LOCK) for name in names if _LEFT.search(name)}
    for name in sorted(output_names):
        clear_leftovers(root / name)


def clear_leftovers(output: Path, *, lock_only: bool = False) -> bool:
    """Remove what killed runs left beside ``output``, unless somebody is writing it now; return whether a
    lock was removed.
    """
    left, lock_file = [] if lock_only else leftovers(output), beside(output, _LOCK)
    if not left and not lock_file.exists():
        return False
    with suppress(OSError, BadInput, DiskFailed):  # it is held, or not ours to remove
        lock = lock_output(output)
        for path in left:
            Disk().remove_tree(path)
        lock.remove()
    return not lock_file.exists()


def bytes_of_leftovers(output: Path) -> int:
    """Return the bytes on the disk that killed runs left for this output: reused, or removed first."""
    files = (path for left in leftovers(output) for path in left.rglob("*") if path.is_file())
    return sum(path.stat().st_blocks * 512 for path in files)


def why_absent(output: Path) -> tuple[str, str]:
    """Return what there is in the place of an output that is not there, and what to do about it."""
    try:
        left = leftovers(output)
        latest = max((path.stat().st_mtime for path in left), default=0.0)
    except OSError:  # a folder that may not be read
        left = []
    if not left:
        return "no such folder", ""
    if _is_locked(beside(output, _LOCK)):
        return f"one that a command is writing now, into {left[0].name}", "Wait until that command has ended"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(latest))
    leftover = f"what a killed command left in {left[0].name}, {when} at the latest"
    return leftover, "Run the same command again: it completes the output"


def _is_locked(path: Path) -> bool:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(OSError), closing(os.open(path, flags)) as fd:
        return not try_lock(fd, shared=True)
    return False


def lock_output(output: Path) -> FileLock:
    """Take the lock of an output; ``BadInput`` where another process has it."""
    path = beside(output, _LOCK)
    with writing(path):
        lock = FileLock.take(path)
    if lock is None:
        holder, todo = "another process writing it", "Wait for it, or choose another output"
        raise BadInput(output, expected="an output of our own", found=holder, todo=todo)
    return lock


def make_folder(folder: Path) -> None:
    """Make a folder and those around it, as far as they are missing; a power cut cannot take them back."""
    missing = [*takewhile(lambda path: not path.exists(), (folder, *folder.parents))]  # thousands, perhaps
    for path in reversed(missing):
        with suppress(FileExistsError):  # another process made it, or it is ``new/../new``
            Disk().make_directory(path)
            Disk().sync_directory(path.parent)
