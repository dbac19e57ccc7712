"""Explain what the operating system refused: the exit code, what happened, and what to do next.

This is the one place for it. The rooms above say which file they were at; the command line explains what no
room has explained. The module imports nothing of torch, because it must also work where torch cannot load.
"""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

#: The exit codes: a path or place that cannot be used, a machine that has too little of something, and an
#: error that nobody foresaw.
PLACE, MACHINE, UNEXPECTED = 2, 3, 70


@dataclass(frozen=True, slots=True)
class Refusal:
    """State for a user what the system refused: exit ``code``, reason, what to do, ``names`` of paths."""

    code: int
    reason: str
    todo: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f"{' -> '.join(self.names)}: " if self.names else ""
        return f"{place}{self.reason}. {self.todo}"


_FREE_SPACE = "Make room on the disk, or name a place on another one, and run the same command again"
_MORE_FILES = "Raise the limit (ulimit -n 4096), or close other programs, and run the same command again"
_MORE_MEMORY = "Free memory, or use a machine with more, and run the same command again"
_MORE_PROCESSES = (
    "Raise the limit on processes and threads (ulimit -u), or end other programs, and run the command again"
)

#: By the system's number for an error: the exit code and what to do next.
_TODO: dict[int, tuple[int, str]] = {
    errno.ENOENT: (PLACE, "Check the path; if the working directory was deleted, change to one that exists"),
    errno.EACCES: (PLACE, "Change the permissions (ls -l shows them), or name another path"),
    errno.EPERM: (PLACE, "Change the permissions (ls -l and lsattr show them), or name another path"),
    errno.EROFS: (PLACE, "Name a place that can be written to"),
    errno.EISDIR: (PLACE, "Name a file, not a folder"),
    errno.ENOTDIR: (PLACE, "A part of the path is a file where a folder is needed: name another path"),
    errno.EEXIST: (PLACE, "Name a path that does not exist yet, or remove what is there"),
    errno.ENOTEMPTY: (PLACE, "Name a path that does not exist yet, or remove what is there"),
    errno.ENAMETOOLONG: (PLACE, "Name a shorter path: most systems allow 255 bytes a name, 4,096 a path"),
    errno.ELOOP: (PLACE, "Links lead around in a circle: name the file itself"),
    errno.EINVAL: (PLACE, "The file system does not take this name or this request: name another path"),
    errno.EILSEQ: (PLACE, "The file system does not take this name: name another path"),
    errno.ENXIO: (PLACE, "Name a regular file, not a pipe, socket or device"),
    errno.ENODEV: (PLACE, "Name a regular file, not a pipe, socket or device"),
    errno.ESPIPE: (PLACE, "Name a regular file, not a pipe, socket or device"),
    errno.EXDEV: (PLACE, "Name a place on the same disk"),
    errno.ETXTBSY: (PLACE, "Another program runs this file: name another path"),
    errno.EBUSY: (PLACE, "Another program holds this path: name another one"),
    errno.ENOSPC: (MACHINE, _FREE_SPACE),
    errno.EDQUOT: (MACHINE, _FREE_SPACE),
    errno.EFBIG: (MACHINE, "Raise the limit on file sizes (ulimit -f), or name another file system"),
    errno.EIO: (MACHINE, "The disk or its connection fails: read the system's log (dmesg)"),
    errno.ESTALE: (MACHINE, "The network file system lost the file: mount it again"),
    errno.EMFILE: (MACHINE, _MORE_FILES),
    errno.ENFILE: (MACHINE, _MORE_FILES),
    errno.ENOMEM: (MACHINE, _MORE_MEMORY),
    errno.EAGAIN: (MACHINE, _MORE_PROCESSES),
    errno.EPIPE: (
        MACHINE,
        "The reader of a pipe stopped. If it was that of the output (such as head), write into a file",
    ),
}

#: Texts of libraries whose errors carry no number.
_IN_WORDS = (
    *((os.strerror(number), number) for number, (code, _) in _TODO.items() if code == MACHINE),
    ("can't start new thread", errno.EAGAIN),
    ("Thread creation failed", errno.EAGAIN),
    ("can't allocate memory", errno.ENOMEM),
    ("failed to map segment from shared object", errno.ENOMEM),
)
#: The system's number in the error texts of Rust's, Arrow's and Python's libraries.
_NUMBER = re.compile(r"(?:os error|\[errno) (\d+)[)\]]", re.IGNORECASE)


def refusal_of(error: BaseException) -> Refusal | None:
    """Explain ``error``; return ``None`` if the operating system is not its cause.

    If the machine has too little of something, that explanation comes before others: a library that got no
    file descriptor may say that the file is damaged. Therefore the causes of the error are examined too.
    """
    for cause in _chain(error):
        number = _number(cause)
        if cause is not error and number == errno.EAGAIN and isinstance(cause, OSError):
            continue  # a lock that is held says the same, and is no fault of the machine's
        if number is not None and _TODO.get(number, (PLACE,))[0] == MACHINE:
            return _explained(number, cause)
    number = error.errno if isinstance(error, OSError) else None
    if number is not None:
        return _explained(number, error)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    visited: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in visited:
        visited.add(id(link))
        yield link
        link = link.__cause__


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if getattr(error, "exit_code", None) is not None:  # already explained: its words may quote a file
        return None
    text = str(error)
    if (match := _NUMBER.search(text)) is not None:
        return int(match[1])
    if isinstance(error, RuntimeError | OSError | ImportError):
        return next((number for words, number in _IN_WORDS if words in text), None)
    return None


def _explained(number: int, error: BaseException) -> Refusal:
    code, todo = _TODO.get(number, (MACHINE, "Run the same command again when the cause is removed"))
    what = os.strerror(number)
    if isinstance(error, BlockingIOError) or "thread" in str(error).lower():
        what = f"no further process or thread can be started ({what})" if number == errno.EAGAIN else what
    paths = (getattr(error, "filename", None), getattr(error, "filename2", None))
    return Refusal(code, what, todo, tuple(os.fsdecode(path) for path in paths if path is not None))
