"""Find the entries of a zip archive as torch writes it: stored as they are, one after the other.

The archive may be a part of a file: a file of ``torch.distributed.checkpoint`` holds one archive after the
other. Only the directory at the end, by Python's ``zipfile``, and each entry's own header are read. Source:
PKWARE's APPNOTE.TXT 6.3, sections 4.3 and 4.5.3.
"""

import os
import struct
from dataclasses import dataclass
from io import BytesIO
from typing import NoReturn
from zipfile import BadZipFile, ZipFile

from ...parallel_state import BadInput
from ..strict_json import shown

_END, _LOCATOR_64, _CENTRAL, _LOCAL = b"PK\x05\x06", b"PK\x06\x07", b"PK\x01\x02", b"PK\x03\x04"
#: Bytes of the end, of what stands before it in an archive of 64 bits, and of an entry's own header.
_END_SIZE, _END_64_SIZE, _LOCAL_SIZE = 22, 56 + 20, 30
#: The most entries, and bytes of their directory.
_MOST_ENTRIES, _MOST_BYTES = 200_000, 64 << 20


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """Describe an entry: where its bytes begin and end in the file, and their CRC-32."""

    begin: int
    end: int
    crc: int


def zip_entries(fd: int, begin: int, end: int, where: object) -> dict[str, ZipEntry]:
    """Return the entries, by name, of the archive that is bytes ``begin`` to ``end`` of an open file.

    ``BadInput`` for an archive that is cut short, compressed or encrypted, or in which entries overlap.
    """

    def refuse(expected: str, found: object, todo: str = "The file is damaged, or was cut short") -> NoReturn:
        raise BadInput(where, "zip", expected=expected, found=found, todo=todo)

    def read(at: int, length: int) -> bytes:
        raw = os.pread(fd, length, at) if begin <= at and at + length <= end else b""
        if len(raw) < length:
            refuse(f"{length:,} bytes at {at:,}", f"an archive from {begin:,} to {end:,}")
        return raw

    tail = read(end - _END_SIZE, _END_SIZE)
    count, size, comment = struct.unpack_from("<HI4xH", tail, 10)
    if tail[:4] != _END or comment:
        refuse("the end of a zip archive", shown(tail[:8]))
    first = max(begin, end - _END_SIZE - _END_64_SIZE - min(size, _MOST_BYTES))
    raw = read(first, end - first)
    if size > _MOST_BYTES or raw.count(_CENTRAL) > _MOST_ENTRIES:
        refuse(f"at most {_MOST_ENTRIES:,} entries in {_MOST_BYTES:,} bytes", f"{count:,} in {size:,}")
    try:
        archive = ZipFile(BytesIO(raw), metadata_encoding="utf-8")
    except (BadZipFile, NotImplementedError, ValueError, struct.error) as error:  # what zipfile raises
        refuse("the directory of a zip archive", shown(str(error)))
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    end_64 = raw[-_END_SIZE - _END_64_SIZE : -_END_SIZE]
    if end_64[56:60] == _LOCATOR_64:  # ``zipfile`` reads the directory's place there, and not the count
        (count,) = struct.unpack_from("<Q", end_64, 32)
    if len(infos) != count:
        refuse(f"{count:,} entries", f"{len(infos):,}")
    entries: dict[str, ZipEntry] = {}
    before = begin
    for info in infos:
        name, nbytes, header = info.filename, info.file_size, first + info.header_offset
        if info.compress_type or info.flag_bits & 1:
            todo = "Write the archive with torch.save, which does not compress"
            refuse("entries stored as they are", f"{shown(name)}, compressed or encrypted", todo)
        if nbytes != info.compress_size:
            refuse(f"{nbytes:,} bytes of {shown(name)}", f"{info.compress_size:,}")
        expected = info.orig_filename.encode()
        local = read(header, _LOCAL_SIZE + len(expected))
        named, extra = struct.unpack_from("<HH", local, 26)
        if (local[:4], local[_LOCAL_SIZE:], named) != (_LOCAL, expected, len(expected)):
            stated = f"the header of {shown(name)} at byte {header:,}, as the directory says"
            refuse(stated, shown(local[:8]))
        entry = ZipEntry(at := header + _LOCAL_SIZE + named + extra, at + nbytes, info.CRC)
        if entry.end > first + archive.start_dir:
            refuse(f"{shown(name)} before the directory", f"{nbytes:,} bytes from byte {at:,}")
        if name in entries:
            refuse("each entry once", f"{shown(name)} twice")
        if header < before:
            refuse("entries one after the other", f"two that overlap at byte {header:,}")
        entries[name], before = entry, entry.end
    return entries
