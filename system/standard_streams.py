"""Look after the standard streams: closed ones, an output whose reader has gone, and what libraries write."""

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed_streams() -> None:
    """Open each closed standard stream on the null device.

    The next file that is opened would else have its number, and what is printed would be written into it.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def pass_any_character() -> None:
    """Let standard output write out characters that its encoding lacks, as ``\\xfc``, instead of failing: of
    a locale without UTF-8, for example (standard error does by itself); and let standard input give the
    replacement character for bytes that its encoding lacks.
    """
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "replace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def goes_nowhere() -> bool:
    """Return whether standard output is the null device."""
    with suppress(OSError, ValueError):  # no file behind it
        return os.path.samestat(os.fstat(sys.stdout.fileno()), os.stat(os.devnull))
    return False


def reader_is_gone(*, nowhere: bool) -> bool:
    """Return whether standard output is a pipe that nobody reads any more, as behind ``| head``.

    Rich puts the null device in the place of such a pipe. ``nowhere``: whether that stood there before.
    """
    with suppress(OSError, ValueError):  # no file behind it
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0)) or (goes_nowhere() and not nowhere)
    return False


def name_standard_output(error: Exception) -> None:
    """Name standard output in an error about a full disk that names no file, if writing there fails too."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if not isinstance(error, OSError) or error.errno not in full or error.filename is not None:
        return
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as refused:
        error.filename = "standard output" if refused.errno == error.errno else None


def drop_output() -> None:
    """Throw away what standard output still holds: at its end Python would try to write it, and complain."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Drop what code other than Python's writes to standard error inside the block.

    For calls whose failure Python hears of anyhow, as an exception.
    """
    sys.stderr.flush()
    try:
        standard_error = os.dup(2)
    except OSError:  # it is closed: nobody would hear anything
        yield
        return
    with (
        open(standard_error, "w", buffering=1, errors="backslashreplace") as python_stderr,
        open(os.devnull, "w") as nowhere,
        redirect_stderr(python_stderr),
    ):
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(python_stderr.fileno(), 2)
