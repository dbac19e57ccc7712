"""End a process: as any script ends, or without taking the interpreter apart."""

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

_abandoned = False


def abandon_threads() -> None:
    """State that threads outside Python's go on when this process ends, such as those of a process group that
    waits for dead peers: an error in one of them, while the interpreter is taken apart, aborts the process.
    """
    global _abandoned
    _abandoned = True


def end(code: int) -> NoReturn:
    """End this process with an exit code; after ``abandon_threads`` as ``leave`` does."""
    if _abandoned:
        leave(code)
    sys.exit(code)


def leave(code: int) -> NoReturn:
    """End this process after its threads and exit functions, but take the interpreter apart no further.

    The rest of an end copies most of the memory that a fork shares: 0.3 s of processor time.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(code)
