"""Open files that somebody else named: only regular ones, inside the given directory, without blocking."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..parallel_state import BadInput, from_os_error, require
from .disk import closing
from .strict_json import shown

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def is_there(path: Path, *, expected: str, kind: type[BadInput] = BadInput) -> bool:
    """Tell whether there is anything of this name; refuse one that no file can have, such as one too long."""
    try:
        return path.exists()
    except OSError as error:
        raise from_os_error(error, path, expected=expected, kind=kind) from None


def stat_regular(path: Path, *, kind: type[BadInput] = BadInput, todo: str = "") -> os.stat_result:
    """Return the status of a regular file; refuse others without opening them (opening a pipe blocks)."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        dangling = f"a link to {os.readlink(path)}, which is absent" if path.is_symlink() else "nothing there"
        todo = todo or "Copy the file here, or name another"
        raise kind(path, expected="a file", found=dangling, todo=todo) from None
    except OSError as error:
        raise from_os_error(error, path, expected="a file", kind=kind) from None
    except ValueError as error:  # an embedded NUL
        raise kind(shown(str(path)), expected="a file", found=str(error)) from None
    file_kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
    todo = todo or "Put the file itself in its place, or name another"
    require(stat.S_ISREG(status.st_mode), path, None, "a regular file", file_kind, todo, kind=kind)
    return status


@contextmanager
def open_regular(
    path: Path, *, kind: type[BadInput] = BadInput, todo: str = ""
) -> Iterator[tuple[int, os.stat_result]]:
    """Yield a read-only descriptor of a regular file and its status; it is closed when the block ends."""
    stat_regular(path, kind=kind, todo=todo)
    try:
        # O_NONBLOCK: whoever swaps the file for a pipe between the two calls cannot make us wait.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise from_os_error(error, path, expected="a readable file", kind=kind) from None
    with closing(fd):
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise kind(path, expected="a file", found="something that changed while it was opened")
        yield fd, status


def read_small(path: Path, limit: int, *, kind: type[BadInput] = BadInput) -> bytes:
    """Return all bytes of a regular file of at most ``limit`` bytes."""
    with open_regular(path, kind=kind) as (fd, status):
        if status.st_size > limit:
            raise kind(path, expected=f"at most {limit:,} bytes", found=f"{status.st_size:,}")
        parts, room = [], limit
        try:
            while part := os.read(fd, min(room + 1, 1 << 20)):
                parts.append(part)
                if (room := room - len(part)) < 0:
                    raise kind(path, expected=f"at most {limit:,} bytes", found="a file that grows")
        except OSError as error:
            raise from_os_error(error, path, expected="a readable file", kind=kind) from None
        return b"".join(parts)


def read_full(fd: int, into: memoryview, offset: int) -> int:
    """Read from ``offset`` on until ``into`` is full, or the file ends; return the number of bytes."""
    filled = 0
    while filled < len(into) and (count := os.preadv(fd, [into[filled:]], offset + filled)):
        filled += count
    return filled


def is_plain(name: str) -> bool:
    """Tell whether a name is printable and no path: no separator, no ``..``."""
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and name.isprintable()


def check_plain_name(name: object, where: object, key: object, *, kind: type[BadInput] = BadInput) -> str:
    """Check that a file name stays in its directory: no separator, no ``..``, no control character."""
    if not isinstance(name, str):
        raise kind(where, key, expected="the name of a file", found=f"a {type(name).__name__}")
    if not is_plain(name) or len(os.fsencode(name)) > 255:
        raise kind(where, key, expected="a plain file name in the same directory", found=shown(name))
    return name


def contained(
    root: Path, name: str, *, allow_symlinks: bool | None = None, kind: type[BadInput] = BadInput
) -> Path:
    """Return the path of ``name`` in ``root``; refuse it if a link leads out of it.

    The Hugging Face cache keeps ``snapshots/<revision>/<name>`` as links into ``blobs/`` two levels up. Those
    links are followed, and no others to the outside. ``allow_symlinks`` follows any; with ``None`` the user
    has no such choice.
    """
    path = root / name
    if allow_symlinks or not path.is_symlink():
        return path
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    allowed = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    if not any(real.is_relative_to(directory) for directory in allowed):
        choice = ", or, if you trust the link, use `trilith convert --allow-symlinks`"
        todo = f"Copy the file here{'' if allow_symlinks is None else choice}"
        raise kind(path, expected="a file inside the directory", found=f"a link to {real}", todo=todo)
    return path
