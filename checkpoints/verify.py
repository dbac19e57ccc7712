"""Reading every byte of a checkpoint once: checksums against the manifest, replicas against their owners."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..parallel_state import BadCheckpoint, Box
from .crc import combine
from .manifest import Manifest, StoredFile
from .plain_files import contained, open_regular
from .strict_json import shown
from .tensor_file import TensorFile

_PIECE = 4 << 20


def verify(
    directory: Path | str,
    manifest: Manifest,
    *,
    threads: int = 2,
    progress: Callable[[int], None] = lambda read: None,
) -> None:
    """Refuse the checkpoint unless every file is, byte for byte, the one that was written.

    ``progress`` is called with the number of bytes read since the last call, from any of ``threads``.
    """
    directory = Path(directory)

    def read(stored: StoredFile, file: TensorFile) -> dict[str, int]:
        return _verify_file(file, stored, progress)

    with ThreadPoolExecutor(threads) as pool:
        sums = list(pool.map(read, manifest.files, manifest.open_files(directory)))
        list(pool.map(lambda companion: _verify_companion(directory, companion), manifest.companions))
    for name, tensor in manifest.tensors.items():
        first: dict[Box, int] = {}
        for part in sorted(tensor.parts, key=lambda part: part.role):
            owner = first.setdefault(part.box, part.file)
            if sums[owner][name] != sums[part.file][name]:
                files = f"{manifest.files[owner].name} and {manifest.files[part.file].name}"
                raise BadCheckpoint(
                    directory, shown(name), expected="equal replicas", found=f"a difference: {files}"
                )


def verify_files(directory: Path | str, manifest: Manifest, numbers: Iterable[int]) -> None:
    """Refuse the checkpoint unless these of its files are, byte for byte, those that were written."""
    files = list(manifest.open_files(Path(directory)))
    for number in numbers:
        _verify_file(files[number], manifest.files[number], lambda read: None)


def _verify_file(file: TensorFile, stored: StoredFile, progress: Callable[[int], None]) -> dict[str, int]:
    """The CRC-32 of each tensor's bytes, once that of the whole file is right."""
    sums = {}
    with open_regular(file.path, kind=BadCheckpoint) as (fd, _):
        whole = _sum(fd, 0, file.data_begin, progress)
        for name, entry in sorted(file.tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            sums[name] = _sum(fd, entry.begin, entry.end, progress)
            whole = combine(whole, sums[name], entry.nbytes)
    _check(file.path, stored, whole)
    return sums


def _verify_companion(directory: Path, stored: StoredFile) -> None:
    path = contained(directory, stored.name, kind=BadCheckpoint)
    with open_regular(path, kind=BadCheckpoint) as (fd, _):
        _check(path, stored, _sum(fd, 0, stored.size, lambda read: None))


def _check(path: Path, stored: StoredFile, crc: int) -> None:
    if crc != stored.crc32:
        todo = "The file was altered or damaged since it was written"
        raise BadCheckpoint(path, "CRC-32", expected=f"{stored.crc32:08x}", found=f"{crc:08x}", todo=todo)


def _sum(fd: int, begin: int, end: int, progress: Callable[[int], None]) -> int:
    crc = 0
    for piece in _pieces(fd, begin, end):
        crc = zlib.crc32(piece, crc)
        progress(len(piece))
    return crc


def _pieces(fd: int, begin: int, end: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_PIECE, end - begin)))
    while begin < end:
        count = os.preadv(fd, [buffer[: end - begin]], begin)
        if not count:
            return  # cut short since its size was looked at: the checksum will not be right
        yield buffer[:count]
        begin += count
