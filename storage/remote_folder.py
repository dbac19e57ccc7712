"""Reach a folder by its path or by a URL that fsspec knows (``s3://``, ``gs://``, ``memory://``), and copy
files from there to this host, into a folder of the user's cache, which has bounded space.

An object store has no rename and no half-written files; a local folder has both. So this module uses only the
operations that all of them have: list, write a whole file, read it, remove it.

Only the files that are asked for are copied, and each version of them once: if a file at the URL changes, the
next call copies anew. A copy is whole or absent. When the cache is full, the copies that were not used for
the longest time are deleted, except those that a process is using.
"""

import hashlib
import math
import os
import posixpath
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..parallel_state import BadCheckpoint, BadInput, MachineFailed, require
from ..system.addresses import note_copy
from .crc import crc32
from .disk import Disk, FileLock, Hold, closing, hold, nobody_reads, writing
from .output_places import remove_checkpoint
from .safe_open import open_regular
from .staging import staged
from .strict_json import shown

_PIECE = 4 << 20
#: The packages of stores -> the extras that install them.
_EXTRAS = {"s3fs": "s3", "gcsfs": "gcs"}


class RemoteFailed(MachineFailed):
    """Report that another place could not be read or written."""


class RemoteFolder:
    """Read and write the files of a folder, which is made when the first file is written.

    Raises ``BadInput`` for a URL that no installed package understands, ``RemoteFailed`` later.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        try:
            self._system, self._root = url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            expected, reason = "a path, or a URL whose file system is installed", str(error).splitlines()[0]
            missing = (pair for pair in _EXTRAS.items() if pair[0] in reason)
            todo = "".join(
                f"Install the extra {extra} of trilith, or: pip install {name}" for name, extra in missing
            )
            raise BadInput(url, expected=expected, found=reason, todo=todo) from None

    @property
    def local(self) -> Path | None:
        """Return the path of a folder on this machine."""
        protocol = self._system.protocol  # a text, or several
        protocols = (protocol,) if isinstance(protocol, str) else protocol
        return Path(self._root) if "file" in protocols else None

    def sizes(self, folder: str = "") -> dict[str, int | None]:
        """Return the names in the folder, or in one inside it: the bytes of a file, ``None`` for a folder."""
        entries = self._entries(folder)
        return {name: info["size"] if info["type"] == "file" else None for name, info in entries.items()}

    def versions(self) -> dict[str, tuple[int, str]]:
        """Return each file's bytes, and a text that is another one if it changes (time, ETag)."""
        files = {name: info for name, info in self._entries("").items() if info["type"] == "file"}
        return {name: (info["size"], repr(sorted(info.items()))) for name, info in files.items()}

    def _entries(self, folder: str) -> dict[str, dict[str, Any]]:
        with self._reaching(folder):
            self._system.invalidate_cache()
            try:
                infos = self._system.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return {}
            return {
                posixpath.basename(info["name"].rstrip("/")): info
                for info in infos
                if info["name"].strip("/") != self._path(folder).strip("/")
            }

    def read(self, name: str) -> bytes | None:
        """Return all bytes of a file; ``None`` if there is none."""
        with self._reaching(name):
            try:
                return bytes(self._system.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def copy(self, source: Path, name: str) -> int:
        """Write a copy of a file; it is on the disk, or in the store, when this returns its CRC-32."""
        crc = 0
        with self._writing(name) as out, open_regular(source) as (fd, _):
            while piece := os.read(fd, _PIECE):
                crc = crc32(piece, crc)
                self._put(out, piece)
        return crc

    def fetch(self, name: str, target: Path) -> int:
        """Copy a file here, to a new file ``target``; it is on the disk when this returns its CRC-32."""
        disk, crc, done = Disk(), 0, 0
        with writing(target), closing(disk.create(target)) as fd:
            with self._reaching(name), self._system.open(self._path(name), "rb") as file:
                while piece := bytes(file.read(_PIECE)):
                    with writing(target):
                        disk.write(fd, memoryview(piece), done)
                    crc, done = crc32(piece, crc), done + len(piece)
            disk.sync(fd)
        return crc

    def write(self, name: str, data: bytes) -> None:
        """Write a small file in one piece."""
        with self._writing(name) as out:
            self._put(out, data)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; it may be gone already."""
        with self._reaching(name), suppress(FileNotFoundError):
            self._system.rm(self._path(name), recursive=True)

    def sync(self, folder: str = "") -> None:
        """Make the names in a folder survive a power cut; an object store needs nothing for that."""
        if self.local is not None:
            with self._reaching(folder):
                Disk().sync_directory(self.local / folder)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name) if name else self._root

    @contextmanager
    def _writing(self, name: str) -> Iterator[Any]:
        path = self._path(name)
        with self._reaching(name):
            self._system.makedirs(posixpath.dirname(path), exist_ok=True)
            with self._system.open(path, "wb") as out:
                yield out
                if self.local is not None:
                    out.flush()
                    os.fsync(out.fileno())

    @contextmanager
    def _reaching(self, name: str) -> Iterator[None]:
        """Turn an error of any store into one line that names the file; what the disk refuses stays."""
        try:
            yield
        except MachineFailed:
            raise
        except Exception as error:  # each store has errors of its own
            line, *_ = str(error).splitlines() or [""]
            raise RemoteFailed(f"{self.url}/{name}: {type(error).__name__}: {line}") from error

    def _put(self, out: Any, piece: bytes) -> None:
        out.write(piece)


#: Environment variables: the folder for the copies, and its most bytes in 10^9.
CACHE, CACHE_GB = "TRILITH_CACHE", "TRILITH_CACHE_GB"
_DEFAULT_GB = 200.0
_LOCK, _LOOK_EVERY = "fetching.lock", 0.2
#: Names of the folders of copies: hashes of what was copied.
_DIGEST = 32
#: Folders that this process uses, locked until it ends.
_in_use: dict[Path, Hold] = {}


def fetched(url: str, needed: Callable[[str], bool]) -> Path:
    """Return a local folder with the wanted files of the folder at ``url``; subfolders are left out.

    The size of each file is compared with its size at the URL. The folder stays until this process ends.
    Processes that fetch at the same time wait for each other. Raises ``BadInput`` if there is no wanted file,
    or if all of them are larger than the cache may be, and ``RemoteFailed``.
    """
    folder = RemoteFolder(url)
    files = {name: version for name, version in folder.versions().items() if needed(name)}
    require(files, url, None, "a folder with files to read", "none")
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
    setting, most = os.environ.get(CACHE_GB) or f"{_DEFAULT_GB}", math.nan
    with suppress(ValueError):
        most = float(setting) * 1e9
    require(most >= 0, "environment", CACHE_GB, "a number of 10^9 bytes", shown(setting))
    expected = f"at most {most / 1e9:g} GB, as {CACHE_GB} says"
    require(need <= most, url, None, expected, f"{need / 1e9:.3g} GB")
    copies = sorted(cache_folder().glob("?" * _DIGEST + "/*/"), key=lambda path: path.stat().st_mtime)
    sizes = {copy: sum(file.stat().st_size for file in copy.iterdir()) for copy in copies}
    in_use = sum(sizes.values())
    for copy in copies:
        if in_use + need > most:
            with nobody_reads(copy) as free:
                if free:
                    remove_checkpoint(copy)
                    Disk().remove_tree(copy.parent)
                    in_use -= sizes[copy]
    expected = f"{need / 1e9:.3g} GB of the {most / 1e9:g} GB that copies may take"
    todo = f"Set {CACHE_GB} to a larger number, or end the processes that use copies in {cache_folder()}"
    require(in_use + need <= most, url, None, expected, f"{in_use / 1e9:.3g} GB in use", todo)
