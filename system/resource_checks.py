"""Refuse to begin with too little: torch ends the process where the system refuses it a file or memory."""

import mmap
import os

#: File descriptors that a command has open at once: of its threads, its ranks' pipes, and libraries.
DESCRIPTORS = 64
#: Bytes without which not even the libraries can be loaded.
MEMORY = 2**28


def check_enough() -> None:
    """Raise the system's own ``OSError`` where this process may not open ``DESCRIPTORS`` more files, or may
    not take ``MEMORY`` more bytes.
    """
    descriptors: list[int] = []
    try:
        for _ in range(DESCRIPTORS):
            descriptors.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    mmap.mmap(-1, MEMORY, flags=mmap.MAP_PRIVATE).close()  # untouched, it costs nothing
