"""Have the system fetch from the disk what a command will read, while its imports still take seconds."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from threading import Thread

from .machine import memory_available

#: Bytes of one advice: Linux fetches no more for one, as its disks are set up by default.
_STEP = 4 << 20
#: The share of the memory that is free which fetched pages may take, and the most of them in bytes.
_SHARE, _MOST = 4, 8 << 30


def read_ahead(folder: Path, readers: int) -> None:
    """Let a thread ask for a folder's weights, in ``readers`` equal stretches from where each reader begins.

    It is advice alone: what is wrong with a file, those who read it will see.
    """
    Thread(target=_advise, args=(folder, readers), daemon=True).start()


def _advise(folder: Path, readers: int) -> None:
    most = min((memory_available() or 0) // _SHARE, _MOST) // _STEP
    with suppress(OSError, ValueError):  # a name may hold a NUL
        steps = list[tuple[Path, int]]()
        for path in sorted(folder.glob("*.safetensors")):
            if stat.S_ISREG((status := path.stat()).st_mode):
                steps += [(path, at) for at in range(0, status.st_size, _STEP)]
        stretch = max(1, -(-len(steps) // readers))
        for first in range(min(stretch, most // readers)):
            for path, at in steps[first::stretch]:
                # One at a time: a checkpoint may have more files than a process may open.
                with path.open("rb", buffering=0) as file:
                    os.posix_fadvise(file.fileno(), at, _STEP, os.POSIX_FADV_WILLNEED)
