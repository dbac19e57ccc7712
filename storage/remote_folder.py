"""Reach a folder by its path or by a URL that fsspec knows (``s3://``, ``gs://``, ``memory://``).

An object store has no rename and no half-written files; a local folder has both. So this module uses only the
operations that all of them have: list, write a whole file, read it, remove it.
"""

import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..parallel_state import BadInput, MachineFailed
from .crc import crc32
from .disk import Disk, closing, writing
from .safe_open import open_regular

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
        with self._reaching(name):
            try:
                self._system.rm(self._path(name), recursive=True)
            except FileNotFoundError:
                return

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
