"""Say what may be written where: refuse, before anything is written, an output that would be in the way; take
an output's lock; remove what killed runs left beside it; delete a checkpoint safely.
"""

import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from rich.filesize import decimal

from ..parallel_state import BadInput, fault, require
from ..system.addresses import address_of
from .disk import Disk, DiskFailed, FileLock, closing, try_lock, writing
from .file_names import LONGEST_NAME, beside, finished_name, kept_by_runs, leftovers, unfinished
from .safe_open import is_there

#: How many of a file's first and last bytes are read to tell which command wrote it.
_SEEN = 1 << 16
#: The room on the disk that is asked for, of what an output needs.
_SPARE = 1.1

#: Takes a file's first and last bytes; returns whether the command that asks has written the file.
IsOurs = Callable[[bytes], bool]


def check_place(output: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuse an output that would lie in an input's folder, in a checkpoint, or among a run's checkpoints."""
    check_outside(output, inputs)
    _check_apart(output)


def _check_apart(output: Path) -> None:
    for folder in _around(output):
        if reserved := kept_by_runs(folder):
            todo = "Choose a place outside"
            raise BadInput(output, expected=f"a place outside {reserved}", found=str(folder), todo=todo)


def check_outside(output: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that is an input or would lie in an input's folder, and one at an address.

    Folders are compared as such and not by their paths, so a mount or a link hides nothing.
    """
    if (address := address_of(output)) is not None:
        todo = "Write to a folder here and copy it to the store, or copy a run's with checkpoint.mirror"
        raise BadInput(address, expected="a path of this machine", found="an address", todo=todo)
    around = _around(output)
    for source in inputs:
        if source.is_file() and output.exists() and output.samefile(source):
            todo = "Choose another name"
            raise BadInput(output, expected="another file than the input", found=source, todo=todo)
        if (name := _inside(around, source)) is not None:
            expected, todo = "an output outside the input", "Choose a place outside"
            raise BadInput(output, expected=expected, found=f"{name}, the input", todo=todo)


def _around(output: Path) -> list[Path]:
    real = Path(os.path.realpath(output))
    return [folder for folder in (real, *real.parents) if os.path.isdir(folder)]


def _inside(around: list[Path], source: Path) -> Path | None:
    """Return the folder around the output that is the source, or one of its subfolders; else ``None``."""
    if not source.is_dir():
        return None
    inner = (child for child in source.iterdir() if child.is_dir() and not child.is_symlink())
    source_folders = [source, *inner]
    return next((folder for folder in around if any(map(folder.samefile, source_folders))), None)


def check_output_file(
    out: Path,
    *,
    ours: IsOurs | None = None,
    force: bool = False,
    inputs: Iterable[Path] = (),
    parents: bool = False,
) -> None:
    """Refuse a file that cannot be written, or that exists and is not ``ours``; creates nothing.

    Without ``ours``, for commands whose earlier output people edit, no file is. ``force`` replaces any
    regular file, but never one in a place that ``check_place`` refuses. ``parents``: make those above it.
    """
    check_place(out, inputs)
    require(not out.is_symlink(), out, None, "a new file", "a link", "Name its target instead")
    require(not out.is_dir(), out, None, "a file to write", "a folder", "Name a file in it")
    check_home(out)
    actual, todo = f"no folder {out.parent}", "Make the folder first"
    require(parents or out.parent.is_dir(), out, None, "a file in a folder that exists", actual, todo)
    if not out.exists():
        return
    require(stat.S_ISREG(out.stat().st_mode), out, None, "a file to write", "a pipe or a device")
    if not force and (ours is None or not ours(_seen(out))):
        todo = "Choose another name, or say --force to replace it"
        actual = "one that exists and is not this command's own earlier output"
        if ours is None:
            actual = "one that exists, and that somebody may have edited"
        raise BadInput(out, expected="a new file", found=actual, todo=todo)


def _seen(path: Path) -> bytes:
    with open(path, "rb") as file:
        first = file.read(_SEEN)
        file.seek(max(len(first), os.fstat(file.fileno()).st_size - _SEEN))
        return first + file.read(_SEEN)


def check_output(output: Path, *, inputs: Iterable[Path] = (), need: int = 0, apart: bool = False) -> None:
    """Refuse an output that cannot be: occupied, an input, not writable, or too small for ``need`` bytes.

    ``apart``: nor may it lie in a checkpoint or among a run's; a checkpoint that is there is an occupied one.
    Nothing is created; of an occupied output the lock is removed that a killed run left beside it.
    """
    check_outside(output, inputs)
    if len(os.fsencode(output.name)) > LONGEST_NAME:
        raise BadInput(output, expected=f"a name of at most {LONGEST_NAME} bytes", found="a longer one")
    check_free(output)
    if apart:
        _check_apart(output)
    space = os.statvfs(check_home(output))
    free = space.f_bavail * space.f_frsize
    files = (path for folder in leftovers(output) for path in folder.rglob("*") if path.is_file())
    need -= sum(path.stat().st_blocks * 512 for path in files)  # reused, or removed first
    if need * _SPARE > free:
        expected = f"{decimal(round(need * _SPARE))} free ({decimal(need)} and a tenth)"
        todo = "Make room on the disk, or name a place on another one"
        raise BadInput(output, expected=expected, found=decimal(free), todo=todo)


def check_free(output: Path) -> None:
    """Refuse an output that is there already, unless it is an empty folder."""
    require(not output.is_symlink(), output, None, "a new directory", "a link", "Name its target instead")
    if output.exists():
        require(output.is_dir(), output, None, "a new directory", "a file", "Choose another name")
        if any(output.iterdir()):
            actual, todo = "one with files in it", "Choose another name or remove it first"
            if clear_leftovers(output, lock_only=True) and not leftovers(output):
                # Killed between the rename and the end: it would have another name if it were not complete.
                actual = "a complete one, and the lock of the command that was killed after it had written it"
                todo = "The lock is removed: use the folder, or choose another name"
            raise BadInput(output, expected="a new or empty directory", found=actual, todo=todo)
        # A new directory takes its place: the shell would be in none.
        place, todo = "the folder that the command runs in", "Name a new folder in it"
        require(not output.samefile("."), output, None, "a new or another directory", place, todo)
        place = "a mount point, which nothing can replace"
        require(not output.is_mount(), output, None, "a new or another directory", place, todo)


def check_home(output: Path) -> Path:
    """Return the existing folder in which the output, or folders around it, will be made.

    Refuse it if it is a file or cannot be written to.
    """
    for home in Path(os.path.abspath(output)).parents:
        if is_there(home, expected="a name that the file system takes"):
            break
        if home.is_symlink():
            actual = f"a link to {os.readlink(home)}, which is absent"
            raise BadInput(home, expected="a directory", found=actual)
    require(home.is_dir(), home, None, "a directory", "a file", "Choose another name")
    if not os.access(home, os.W_OK | os.X_OK):
        actual, todo = "a read-only one", "Change its permissions, or name another place"
        if os.statvfs(home).f_flag & os.ST_RDONLY:
            actual, todo = "one on a read-only file system", "Name another place"
        raise BadInput(home, expected="a directory that we may write to", found=actual, todo=todo)
    return home


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
    paths, lock_file = [] if lock_only else leftovers(output), beside(output, _LOCK)
    if not paths and not lock_file.exists():
        return False
    with suppress(OSError, BadInput, DiskFailed):  # it is held, or not ours to remove
        lock = lock_output(output)
        for path in paths:
            Disk().remove_tree(path)
        lock.remove()
    return not lock_file.exists()


def why_absent(output: Path) -> tuple[str, str]:
    """Return what there is in the place of an output that is not there, and what to do about it."""
    try:
        paths = leftovers(output)
        latest = max((path.stat().st_mtime for path in paths), default=0.0)
    except OSError:  # a folder that may not be read
        paths = []
    if not paths:
        return "no such folder", ""
    if _is_locked(beside(output, _LOCK)):
        return f"one that a command is writing now, into {paths[0].name}", "Wait until that command has ended"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(latest))
    leftover = f"what a killed command left in {paths[0].name}, {when} at the latest"
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
