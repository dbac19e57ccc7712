"""Check the file systems that a run writes to: room, locks, fsync, and the clock of a file server."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..storage.lock import try_lock
from ..system.machine import file_system_of
from .finding import Finding

GROUP = "files"
_GB = 1e9
_LEAST_ROOM = 2e9
#: A server whose clock is further away makes the age of a rank's heartbeat wrong.
_SECONDS_APART = 5.0
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p", "afs")


def check_files(folders: list[Path]) -> Iterator[Finding]:
    """Yield a finding for each place: the working directory, torch's cache, the temporary folder, the given
    ones.
    """
    cache = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir())
    places = {
        "working directory": Path.cwd(),
        "compile cache": cache,
        "temporary": Path(tempfile.gettempdir()),
    }
    places |= {str(folder): folder for folder in folders}
    seen: dict[str, str] = {}
    for name, place in places.items():
        there = next(one for one in (place.absolute(), *place.absolute().parents) if one.is_dir())
        key = os.path.realpath(there)
        if key in seen:
            yield Finding(GROUP, name, "ok", f"{there}: the same folder as {seen[key]}")
            continue
        seen[key] = name
        yield _place(name, there)


def _place(name: str, place: Path) -> Finding:
    system, room = file_system_of(place), shutil.disk_usage(place)
    kind = system.kind if system is not None else "kind not known"
    text = f"{place}: {kind}, {room.free / _GB:.1f} of {room.total / _GB:.1f} GB free"
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            locks = _locks(file.fileno())
            began, wall = time.perf_counter(), time.time()
            file.write(b"trilith doctor\n")
            file.flush()
            os.fsync(file.fileno())
            synced = time.perf_counter() - began
            apart = abs(os.fstat(file.fileno()).st_mtime - wall)
    except OSError as error:
        todo = "Choose a folder that you can write to, with room on its disk"
        return Finding(GROUP, name, "fault", f"{text}; cannot be written to: {error.strerror or error}", todo)
    text += f", fsync {synced * 1e3:.1f} ms"
    if not locks:
        todo = "Keep runs and token files elsewhere: two runs in one folder could not be kept apart"
        return Finding(GROUP, name, "fault", f"{text}; locks do not work", todo)
    if room.free < _LEAST_ROOM:
        todo = "Make room, or choose another disk: a checkpoint takes 12 bytes a parameter"
        return Finding(GROUP, name, "warning", text, todo)
    if apart > _SECONDS_APART:
        todo = "Synchronise the clocks of this machine and the file server (chrony)"
        return Finding(GROUP, name, "warning", f"{text}; its clock is {apart:.0f} s away", todo)
    if kind in _NETWORK and name == "compile cache":
        todo = "Set TORCHINDUCTOR_CACHE_DIR to a local disk"
        return Finding(
            GROUP, name, "warning", f"{text}; over the network, which is slow to compile into", todo
        )
    return Finding(GROUP, name, "ok", f"{text}, locks work")


def _locks(fd: int) -> bool:
    try:
        return try_lock(fd)
    except OSError:
        return False
