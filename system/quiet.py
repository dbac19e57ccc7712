"""Keep from the terminal what a library's C++ code writes to standard error."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


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
