"""Copy files from a URL to this host, into a folder of the user's cache, which has bounded space.

Only the files that are asked for are copied, and each version of them once: if a file at the URL changes, the
next call copies anew. A copy is whole or absent. When the cache is full, the copies that were not used for
the longest time are deleted, except those that a process is using.
"""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from ..parallel_state import BadCheckpoint, BadInput
from ..system.addresses import note_copy
from .disk import Disk, FileLock, Hold, hold, nobody_reads
from .leftovers import remove_checkpoint
from .remote_folder import RemoteFailed, RemoteFolder
from .staging import staged

#: Environment variables: the folder for the copies, and its most bytes in 10^9.
CACHE, CACHE_GB = "TRILITH_CACHE", "TRILITH_CACHE_GB"
_DEFAULT_GB = 200.0
_LOCK, _LOOK_EVERY = "fetching.lock", 0.2
#: Names of the folders of copies: hashes of what was copied.
_DIGEST = 32
#: Folders that this process uses, locked until it ends.
_in_use: dict[Path, Hold] = {}


def fetched(url: str, wanted: Callable[[str], bool]) -> Path:
    """Return a local folder with the wanted files of the folder at ``url``; subfolders are left out.

    The size of each file is compared with its size at the URL. The folder stays until this process ends.
    Processes that fetch at the same time wait for each other. Raises ``BadInput`` if there is no wanted file,
    or if all of them are larger than the cache may be, and ``RemoteFailed``.
    """
    folder = RemoteFolder(url)
    files = {name: version for name, version in folder.versions().items() if wanted(name)}
    if not files:
        raise BadInput(url, expected="a folder with files to read", found="none")
    version = hashlib.sha256(repr((folder.url, sorted(files.items()))).encode()).hexdigest()[:_DIGEST]
    target = cache_folder() / version / folder.url.rpartition("/")[2]
    sizes = {name: size for name, (size, _) in files.items()}
    while not _use(target):
        target.parent.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock.take(target.parent.parent / _LOCK)
        if lock is None:
            time.sleep(_LOOK_EVERY)
            continue
        try:
            if not target.is_dir():
                _make_room(url, sum(sizes.values()))
                _copy(folder, sizes, target)
        finally:
            lock.release()
    note_copy(target, folder.url)
    return target


def cache_folder() -> Path:
    """Return the folder of this user's cache for what is on its way from and to URLs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE) or Path(home) / "trilith" / "fetched")


def _copy(folder: RemoteFolder, sizes: dict[str, int], target: Path) -> None:
    with staged(target, need=sum(sizes.values())) as staging:
        for name, size in sizes.items():
            folder.fetch(name, staging.directory / name)
            copied_size = (staging.directory / name).stat().st_size
            if copied_size != size:
                raise RemoteFailed(f"{folder.url}/{name}: expected {size} bytes, found {copied_size}")
        staging.publish()


def _use(target: Path) -> bool:
    """Keep a folder from being deleted while this process lives; false if it is not there."""
    if target not in _in_use:
        try:
            use = hold(target)
        except BadCheckpoint:  # it is not there, or somebody deletes it
            return False
        if not target.exists():
            use.release()
            return False
        _in_use[target] = use
    os.utime(target)
    return True


def _make_room(url: str, need: int) -> None:
    """Delete copies, the longest unused first, until ``need`` bytes more are within the bound."""
    setting = os.environ.get(CACHE_GB, "")
    try:
        most = float(setting or _DEFAULT_GB) * 1e9
    except ValueError:
        raise BadInput("environment", CACHE_GB, expected="a number of 10^9 bytes", found=setting) from None
    if need > most:
        expected = f"at most {most / 1e9:g} GB, as {CACHE_GB} says"
        raise BadInput(url, expected=expected, found=f"{need / 1e9:.3g} GB")
    copies = sorted(cache_folder().glob("?" * _DIGEST + "/*/"), key=lambda path: path.stat().st_mtime)
    sizes = {copy: sum(file.stat().st_size for file in copy.iterdir()) for copy in copies}
    left = sum(sizes.values())
    for copy in copies:
        if left + need > most:
            with nobody_reads(copy) as free:
                if free:
                    remove_checkpoint(copy)
                    Disk().remove_tree(copy.parent)
                    left -= sizes[copy]
    if left + need > most:
        expected = f"{need / 1e9:.3g} GB of the {most / 1e9:g} GB that copies may take"
        todo = f"Set {CACHE_GB} to a larger number, or end the processes that use copies in {cache_folder()}"
        raise BadInput(url, expected=expected, found=f"{left / 1e9:.3g} GB in use", todo=todo)
