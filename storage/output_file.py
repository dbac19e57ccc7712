"""Write a command's output file: whole under its name or not at all, and never over a file of others.

    with output_file(out, ours=is_report) as path:   # checks the place; a new file beside it
        path.write_text(...)
                                                     # on the disk, then under its name in one step

Killed at any point, the name is absent or as it was; the next call removes what was left beside it.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..parallel_state import BadInput
from ..system.addresses import address_of
from .disk import Disk, writing
from .file_names import leftovers, unfinished
from .folder_kind import CHECKPOINTS, FolderKind, holds_steps, kinds_of
from .lock import FileLock
from .parents import make_parents, remove_empty

#: How many of a file's first and last bytes are read to tell which command wrote it.
_SEEN = 1 << 16

#: Takes a file's first and last bytes; returns whether the command that asks has written the file.
IsOurs = Callable[[bytes], bool]


def nobodys(seen: bytes) -> bool:
    """Return false: for commands whose earlier output people edit, no existing file may be replaced."""
    return False


def check_place(output: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuse an output that would lie in an input's folder, in a checkpoint, or among a run's checkpoints."""
    check_outside(output, inputs)
    for folder in _around(output):
        if reserved := _kept_by_runs(folder):
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
        if (inside := _inside(around, source)) is not None:
            todo = "Choose a place outside"
            raise BadInput(
                output, expected="an output outside the input", found=f"{inside}, the input", todo=todo
            )


def _around(output: Path) -> list[Path]:
    real = Path(os.path.realpath(output))
    return [folder for folder in (real, *real.parents) if os.path.isdir(folder)]


def _inside(around: list[Path], source: Path) -> Path | None:
    """Return the folder around the output that is the source, or one of its subfolders; else ``None``."""
    if not source.is_dir():
        return None
    source_folders = [
        source,
        *(child for child in source.iterdir() if child.is_dir() and not child.is_symlink()),
    ]
    for folder in around:
        if any(os.path.samefile(folder, source_folder) for source_folder in source_folders):
            return folder
    return None


def _kept_by_runs(folder: Path) -> str:
    if holds_steps(folder) or (folder.name == CHECKPOINTS and FolderKind.RUN in kinds_of(folder.parent)):
        return "a run's checkpoints"
    if FolderKind.CHECKPOINT in kinds_of(folder) and any(folder.glob("*.safetensors")):
        return "a checkpoint"
    return ""


def check_output_file(
    out: Path,
    *,
    ours: IsOurs = nobodys,
    force: bool = False,
    inputs: Iterable[Path] = (),
    parents: bool = False,
) -> None:
    """Refuse a file that cannot be written, or that exists and is not ``ours``; creates nothing.

    ``force`` replaces any regular file, but never one in a place that ``check_place`` refuses. ``parents``:
    folders above it will be made.
    """
    check_place(out, inputs)
    if out.is_symlink():
        raise BadInput(out, expected="a new file", found="a link", todo="Name its target instead")
    around = Path(os.path.abspath(out)).parent  # of the root it is the root
    above = next(folder for folder in (around, *around.parents) if folder.exists())
    if not above.is_dir():
        raise BadInput(out, expected="a file in a folder", found=f"{above}, which is a file")
    if not parents and not out.parent.is_dir():
        actual, todo = f"no folder {out.parent}", "Make the folder first"
        raise BadInput(out, expected="a file in a folder that exists", found=actual, todo=todo)
    if out.is_dir():
        raise BadInput(out, expected="a file to write", found="a folder", todo="Name a file in it")
    if not out.exists():
        return
    if not stat.S_ISREG(out.stat().st_mode):
        raise BadInput(out, expected="a file to write", found="a pipe or a device")
    if not force and not ours(_seen(out)):
        todo = "Choose another name, or say --force to replace it"
        actual = "one that exists and is not this command's own earlier output"
        if ours is nobodys:  # nor can it be told from what the user has made of it
            actual = "one that exists, and that somebody may have edited"
        raise BadInput(out, expected="a new file", found=actual, todo=todo)


@contextmanager
def output_file(
    out: Path,
    *,
    ours: IsOurs = nobodys,
    force: bool = False,
    inputs: Iterable[Path] = (),
    parents: bool = False,
) -> Iterator[Path]:
    """Yield the path of an empty file; it gets the name ``out`` when the block ends without an error.

    ``BadInput`` as in ``check_output_file``, also for a file that appears meanwhile.
    """
    inputs = [*inputs]
    check_output_file(out, ours=ours, force=force, inputs=inputs, parents=parents)
    with writing(out), _fresh(out) as path:
        yield path
        _publish(path, out, ours=ours, force=force, inputs=inputs)


@contextmanager
def _fresh(out: Path) -> Iterator[Path]:
    """Yield a new file beside ``out``, in folders made for it; it is removed if it has not become ``out``."""
    made = make_parents(out.parent)
    _remove_leftovers(out)
    lock = _begin(out)
    try:
        yield lock.path
        made = []
    finally:
        lock.path.unlink(missing_ok=True)
        lock.release()
        remove_empty(made)


def _publish(fresh: Path, out: Path, *, ours: IsOurs, force: bool, inputs: Iterable[Path]) -> None:
    with open(fresh, "rb") as written:  # a library may have made the file anew
        os.fsync(written.fileno())
    try:
        os.link(fresh, out)  # unlike a rename, never over a file that appeared meanwhile
    except OSError:  # it exists, or this file system has no hard links
        check_output_file(out, ours=ours, force=force, inputs=inputs)
        os.replace(fresh, out)
    Disk().sync_directory(out.parent)


def _begin(out: Path) -> FileLock:
    """Make a new file beside ``out``, locked: as long as it is, others leave it alone."""
    while (lock := FileLock.take(unfinished(out, secrets.token_hex(8)))) is None:
        pass  # taken for a leftover as soon as it was there
    return lock


def _remove_leftovers(out: Path) -> None:
    """Remove what killed calls left for this output; a call that is at work holds a lock."""
    for path in leftovers(out):
        if path.is_file() and not path.is_symlink() and (lock := FileLock.take(path)) is not None:
            path.unlink(missing_ok=True)
            lock.release()


def _seen(path: Path) -> bytes:
    with open(path, "rb") as file:
        first = file.read(_SEEN)
        file.seek(max(len(first), os.fstat(file.fileno()).st_size - _SEEN))
        return first + file.read(_SEEN)
