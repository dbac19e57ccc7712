"""Check the file systems that a run writes to: room, locks, fsync, the clock of a file server, speed."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...storage.disk import try_lock
from ...system.machine import file_system_of
from ..facts import Finding

GROUP = "files"
_GB = 1e9
_LEAST_ROOM = 2e9
#: A server whose clock is further away makes the age of a rank's heartbeat wrong.
_SECONDS_APART = 5.0
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "9p", "afs")


#: Bytes that are written into a folder to measure its disk, and at a time.
_WRITTEN, _PIECE = 64 << 20, 1 << 20


@dataclass(frozen=True, slots=True)
class Folder:
    """Hold the free bytes of a folder's disk and its speed in bytes a second, or why it cannot be used."""

    free: int = 0
    written: float = 0.0
    read: float = 0.0
    error: str = ""


def check_files(folders: list[Path]) -> Iterator[Finding]:
    """Yield a finding for each place: working directory, torch's cache, temporary folder, given ones."""
    temporary = Path(tempfile.gettempdir())
    cache = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or temporary)
    places = {"working directory": Path.cwd(), "compile cache": cache, "temporary": temporary}
    places |= {str(folder): folder for folder in folders}
    names: dict[str, str] = {}
    for name, place in places.items():
        existing = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.is_dir())
        key = os.path.realpath(existing)
        if key in names:
            yield Finding(GROUP, name, "ok", f"{existing}: the same folder as {names[key]}")
            continue
        names[key] = name
        yield _place(name, existing)


def _place(name: str, place: Path) -> Finding:
    kind, room = file_system_of(place) or "kind not known", shutil.disk_usage(place)
    text = f"{place}: {kind}, {room.free / _GB:.1f} of {room.total / _GB:.1f} GB free"
    locks = False
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            with suppress(OSError):
                locks = try_lock(file.fileno())
            began, wall = time.perf_counter(), time.time()
            file.write(b"trilith doctor\n")
            file.flush()
            os.fsync(file.fileno())
            synced = time.perf_counter() - began
            apart = abs(os.fstat(file.fileno()).st_mtime - wall)
    except OSError as error:
        todo = "Choose a folder that you can write to, with room on its disk"
        return Finding(GROUP, name, "fault", f"{text}; cannot be written to: {error.strerror or error}", todo)
    text, todo = f"{text}, fsync {synced * 1e3:.1f} ms", ""
    if not locks:
        text += "; locks do not work"
        todo = "Keep runs and token files elsewhere: two runs in one folder could not be kept apart"
    elif room.free < _LEAST_ROOM:
        todo = "Make room, or choose another disk: a checkpoint takes 12 bytes a parameter"
    elif apart > _SECONDS_APART:
        text += f"; its clock is {apart:.0f} s away"
        todo = "Synchronise the clocks of this machine and the file server (chrony)"
    elif kind in _NETWORK and name == "compile cache":
        text += "; over the network, which is slow to compile into"
        todo = "Set TORCHINDUCTOR_CACHE_DIR to a local disk"
    text += "" if todo else ", locks work"
    return Finding.unless(GROUP, name, text, todo, "warning" if locks else "fault")


def measure_folder(folder: Path) -> Folder:
    """Measure a folder's disk with a file that is written, synced, read back and deleted."""
    piece = os.urandom(_PIECE)
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".trilith-doctor-", buffering=0) as file:
            began = time.perf_counter()
            for _ in range(_WRITTEN // _PIECE):
                file.write(piece)
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
            # Read from the disk and not from memory.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began = time.perf_counter()
            while file.read(_PIECE):
                pass
            read = time.perf_counter() - began
    except OSError as error:
        return Folder(error=error.strerror or str(error))
    return Folder(free, _WRITTEN / seconds, _WRITTEN / read)
