"""Find the entries of a zip archive as torch writes it: stored as they are, one after the other.

The archive may be a part of a file: a file of ``torch.distributed.checkpoint`` holds one archive after the
other. Only the directory at the end and each entry's own header are read. Source: PKWARE's APPNOTE.TXT 6.3,
sections 4.3 and 4.5.3.
"""

import os
import struct
from dataclasses import dataclass
from typing import NoReturn

from ...parallel_state import BadInput
from ..strict_json import shown

_END, _END_64, _LOCATOR_64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_END_SIZE, _LOCATOR_SIZE, _END_64_SIZE = 22, 20, 56
_CENTRAL, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"
_CENTRAL_SIZE, _LOCAL_SIZE = 46, 30
_ZIP64 = 1
_IN_ZIP64 = 0xFFFFFFFF
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
    if tail[:4] != _END:
        refuse("the end of a zip archive", shown(tail[:8]))
    count, size, offset = struct.unpack_from("<HII", tail, 10)
    last = end - _END_SIZE
    if end - begin >= _END_SIZE + _LOCATOR_SIZE:
        locator = read(last - _LOCATOR_SIZE, _LOCATOR_SIZE)
        if locator[:4] == _LOCATOR_64:
            last = begin + int(struct.unpack_from("<Q", locator, 8)[0])
            record = read(last, _END_64_SIZE)
            if record[:4] != _END_64:
                refuse("the 64-bit end of a zip archive", shown(record[:8]))
            count, size, offset = struct.unpack_from("<QQQ", record, 32)
    if count > _MOST_ENTRIES or size > _MOST_BYTES:
        refuse(f"at most {_MOST_ENTRIES:,} entries in {_MOST_BYTES:,} bytes", f"{count:,} in {size:,}")
    if begin + offset + size != last:
        refuse(f"a directory up to byte {last:,}", f"one up to {begin + offset + size:,}")
    directory = read(begin + offset, size)
    entries: dict[str, tuple[int, ZipEntry]] = {}
    at = 0
    while at < size:
        if directory[at : at + 4] != _CENTRAL or at + _CENTRAL_SIZE > size:
            refuse("an entry of the directory", shown(directory[at : at + 8]))
        flags, method, crc, packed, nbytes, named, extra_length, comment_length, place = struct.unpack_from(
            "<HH4xIIIHHH8xI", directory, at + 8
        )
        at += _CENTRAL_SIZE
        if at + named + extra_length + comment_length > size:
            refuse("a whole directory", "one that is cut short")
        raw_name, extra = directory[at : at + named], directory[at + named : at + named + extra_length]
        at += named + extra_length + comment_length
        name = raw_name.decode("utf-8", "replace")
        if method or flags & 1:
            todo = "Write the archive with torch.save, which does not compress"
            refuse("entries stored as they are", f"{shown(name)}, compressed or encrypted", todo)
        nbytes, packed, place = _wide(extra, (nbytes, packed, place))
        if nbytes != packed:
            refuse(f"{nbytes:,} bytes of {shown(name)}", f"{packed:,}")
        header = begin + place
        local = read(header, _LOCAL_SIZE + named)
        if (
            local[:4] != _LOCAL
            or local[_LOCAL_SIZE:] != raw_name
            or local[26:28] != named.to_bytes(2, "little")
        ):
            refuse(f"the header of {shown(name)} at byte {header:,}", shown(local[:8]))
        first = header + _LOCAL_SIZE + named + int.from_bytes(local[28:30], "little")
        if first + nbytes > begin + offset:
            refuse(f"{shown(name)} before the directory", f"{nbytes:,} bytes from byte {first:,}")
        if name in entries:
            refuse("each entry once", f"{shown(name)} twice")
        entries[name] = header, ZipEntry(first, first + nbytes, crc)
    if len(entries) != count:
        refuse(f"{count:,} entries", f"{len(entries):,}")
    before = begin
    for header, entry in sorted(entries.values(), key=lambda header_and_entry: header_and_entry[0]):
        if header < before:
            refuse("entries one after the other", f"two that overlap at byte {header:,}")
        before = entry.end
    return {name: entry for name, (_, entry) in entries.items()}


def _wide(extra: bytes, numbers: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return size, packed size and offset, those that do not fit in 32 bits from the 64-bit extra field."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _ZIP64:
            wide = extra[at + 4 : at + 4 + length]
        at += 4 + length
    made = []
    for number in numbers:
        if number == _IN_ZIP64 and len(wide) >= 8:
            number, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        made.append(number)
    nbytes, packed, place = made
    return nbytes, packed, place
