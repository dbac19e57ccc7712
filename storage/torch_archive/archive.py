"""Find the tensors in what ``torch.save`` wrote, by offset, without running what its pickle names.

An archive is a zip file whose entries are stored as they are, one after the other: ``data.pkl`` describes the
object, and each storage is an entry ``data/KEY``. A tensor is a view of a storage. The archive may be a part
of a file: a file of ``torch.distributed.checkpoint`` holds one after the other. Only the directory at its
end, by Python's ``zipfile``, and each entry's own header are read. Source: PKWARE's APPNOTE.TXT 6.3, sections
4.3 and 4.5.3; ``torch/serialization.py`` (``_save``, ``_load``) and
``torch/_utils.py`` (``_rebuild_tensor_v2``, ``_rebuild_tensor_v3``, ``_rebuild_parameter``).
"""

import os
import struct
from collections import ChainMap
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn, cast
from zipfile import BadZipFile, ZipFile

from ...parallel_state import BadCheckpoint, BadInput, require
from ..crc import crc32
from ..dtypes import BITS, TORCH
from ..strict_json import shown, what_it_looks_like
from ..strides import View
from .pickle_records import Maker, Name, OrderedDict, read_records
from .view_file import ViewFile, ZipEntry

_ZIP, _TAR_NAME, _PICKLE = b"PK", b"./", b"\x80"
#: The format's names of types, by those that pickles have.
DTYPES = {str(dtype): name for name, dtype in TORCH.items()}
#: torch's typed storages; those of newer types are untyped, and the tensor names its dtype.
_STORAGES = {
    **{"torch.DoubleStorage": "F64", "torch.FloatStorage": "F32", "torch.HalfStorage": "F16"},
    **{"torch.BFloat16Storage": "BF16", "torch.LongStorage": "I64", "torch.IntStorage": "I32"},
    **{"torch.ShortStorage": "I16", "torch.CharStorage": "I8", "torch.ByteStorage": "U8"},
    **{"torch.BoolStorage": "BOOL", "torch.storage.UntypedStorage": "U8"},
}


_END, _LOCATOR_64, _CENTRAL, _LOCAL = b"PK\x05\x06", b"PK\x06\x07", b"PK\x01\x02", b"PK\x03\x04"
#: Bytes of the end, of what stands before it in an archive of 64 bits, and of an entry's own header.
_END_SIZE, _END_64_SIZE, _LOCAL_SIZE = 22, 56 + 20, 30
#: The most entries, and the most bytes of their directory and of an archive's pickle.
_MOST_ENTRIES, _MOST_BYTES = 200_000, 64 << 20


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    entry: ZipEntry

    def __setstate__(self, state: object) -> NoReturn:
        raise ValueError("a state for a storage")


def read_archive(
    file: ViewFile, begin: int = 0, end: int | None = None, allowed: Mapping[str, Maker | None] | None = None
) -> object:
    """Return the object in the archive that is bytes ``begin`` to ``end`` of a file (default: all of it), as
    plain data; its tensors are ``View``s that count from the file's first byte.

    The file is told the storages with the CRC-32 that the archive states; only those of the pickle and the
    byte order are compared yet. ``allowed``: names that may occur besides torch's own for tensors (see
    ``read_records``). ``BadInput`` for an older form than the zip archives of torch 1.6, for any other name,
    for an archive whose storages and tensors do not fit together; ``BadCheckpoint`` for an altered pickle.
    """
    where = file.path
    with file.opened() as fd:
        first = os.pread(fd, 262, begin)
        if not first.startswith(_ZIP):
            expected, todo = "an archive of torch.save", _way_out(first)
            raise BadInput(where, expected=expected, found=shown(first[:16]), todo=todo)
        entries = zip_entries(fd, begin, file.size if end is None else end, where)
        pickles = [name for name in entries if name.endswith("/data.pkl")]
        todo = "It is a zip archive, but none that torch.save wrote"
        require(len(pickles) == 1, where, None, "one entry data.pkl", len(pickles), todo)
        root = pickles[0].removesuffix("data.pkl")
        order = entries.get(f"{root}byteorder")
        if order is not None and (byte_order := _checked(fd, order, where, f"{root}byteorder")) != b"little":
            raise BadInput(where, f"{root}byteorder", expected="little", found=shown(byte_order))
        raw = _checked(fd, entries[pickles[0]], where, pickles[0])

    def storage(args: tuple[Any, ...]) -> _Storage:
        kind, name, key, _, count = args
        if kind != "storage" or not isinstance(name, Name) or name.text not in _STORAGES:
            raise ValueError("no storage of a type that torch holds")
        if not isinstance(key, str) or type(count) is not int:
            raise ValueError("a storage without a key and a number of elements")
        dtype, entry = _STORAGES[name.text], entries.get(f"{root}data/{key}")
        if entry is None or count * (BITS[dtype] // 8) != entry.end - entry.begin:
            stored = "no such entry" if entry is None else f"{entry.end - entry.begin:,} bytes"
            raise ValueError(f"{stored} for {count} elements of {dtype} in {root}data/{key}")
        file.know(entry)
        return _Storage(dtype, entry)

    names = ChainMap(_NAMES, cast(dict[str, Maker | None], allowed or {}))
    return read_records(raw, f"{where}: {pickles[0]}", names, persistent=storage)


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
    except (BadZipFile, NotImplementedError, ValueError, struct.error) as error:  # zipfile's for damage
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
            promised = f"the header of {shown(name)} at byte {header:,}, as the directory says"
            refuse(promised, shown(local[:8]))
        entry = ZipEntry(at := header + _LOCAL_SIZE + named + extra, at + nbytes, info.CRC)
        if entry.end > first + archive.start_dir:
            refuse(f"{shown(name)} before the directory", f"{nbytes:,} bytes from byte {at:,}")
        if name in entries:
            refuse("each entry once", f"{shown(name)} twice")
        if header < before:
            refuse("entries one after the other", f"two that overlap at byte {header:,}")
        entries[name], before = entry, entry.end
    return entries


def _checked(fd: int, entry: ZipEntry, where: Path, name: str) -> bytes:
    """Return the bytes of a small entry after comparing their CRC-32."""
    size = f"{entry.end - entry.begin:,}"
    require(entry.end - entry.begin <= _MOST_BYTES, where, name, f"at most {_MOST_BYTES:,} bytes", size)
    raw = os.pread(fd, entry.end - entry.begin, entry.begin)
    if crc32(raw) != entry.crc:
        expected, todo = f"CRC-32 {entry.crc:08x}", "The file was altered or damaged since it was written"
        raise BadCheckpoint(where, name, expected=expected, found=f"{crc32(raw):08x}", todo=todo)
    return raw


def _way_out(first: bytes) -> str:
    """Return what to do with a file that is no zip archive."""
    if first.startswith((_PICKLE, _TAR_NAME)) or first[257:262] == b"ustar":
        return (
            "This is the form before torch 1.6, a bare pickle or a tar file; it is not read. If you trust "
            "its origin, load it with torch.load and write it with torch.save or as safetensors"
        )
    damaged = "The file is damaged, or of another kind: copy it again"
    return what_it_looks_like(first) or (damaged if first else "The file is empty: copy it again")


def _whole_numbers(value: object) -> tuple[int, ...]:
    if isinstance(value, tuple) and all(type(number) is int and 0 <= number < 1 << 62 for number in value):
        return value
    raise ValueError("no tuple of whole numbers")


def _tensor(args: tuple[Any, ...], dtype: str | None = None) -> View:
    storage, offset, size, stride = args[:4]
    if any(args[6 if dtype is None else 7 :]):  # so torch notes views that read other numbers than are stored
        raise ValueError("a view that negates or conjugates: save tensor.resolve_neg().resolve_conj()")
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor without a storage")
    (offset,), shape, strides = (_whole_numbers(numbers) for numbers in ((offset,), size, stride))
    if len(shape) != len(strides) or len(shape) > 64:
        raise ValueError(f"shape {shown(shape)} with strides {shown(strides)}")
    dtype = storage.dtype if dtype is None else dtype
    begin = storage.entry.begin + offset * (BITS[dtype] // 8)
    view = View.strided(dtype, shape, begin, strides)
    if view.end > storage.entry.end:
        end = f"{storage.entry.end - storage.entry.begin:,} bytes"
        raise ValueError(f"offset {offset}, shape {shown(shape)}, strides {shown(strides)} in {end}")
    return view


def _tensor_of_dtype(args: tuple[Any, ...]) -> View:
    name = args[6]
    if not isinstance(name, Name) or name.text not in DTYPES:
        raise ValueError("no dtype that torch holds")
    return _tensor(args, DTYPES[name.text])


def _parameter(args: tuple[Any, ...]) -> View:
    if not args or not isinstance(args[0], View):
        raise ValueError("a parameter without a tensor")
    return args[0]


def size_of(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Make what stands for a ``torch.Size``: a tuple."""
    (size,) = args
    return _whole_numbers(size)


#: torch's own names in files of tensors. ``None``: it may stand there, and a record of it is left alone.
_NAMES: dict[str, Maker | None] = {
    "collections.OrderedDict": OrderedDict.make,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.Size": size_of,
    "torch.device": None,
    **dict.fromkeys((*_STORAGES, *DTYPES)),
}


#: The most letters of a name in dicts inside one another.
_LONGEST_NAME = 500


def open_state_dict(path: Path, *, expected: Container[str] = ()) -> ViewFile:
    """Open ``path``; its tensors have the names that they have in the saved dict, joined with a dot where
    dicts lie inside one another, whether they are ``expected`` or not. What is no tensor is left out.
    ``BadInput`` if there is no tensor.
    """
    file = ViewFile(path)
    value = read_archive(file)
    for name, view in nested(value, path):
        if isinstance(view, View):
            if name in file.tensors or not name.isprintable():
                raise BadInput(path, shown(name), expected="a printable name, once", found="another")
            file.add(view, name)
    kind = "single tensor" if isinstance(value, View) else f"{type(value).__name__} without any"
    todo = "Save the model's state_dict(), by its names, in a dict"
    require(file.tensors, path, None, "a dict of tensors", f"a {kind}", todo)
    return file


def nested(stored: object, where: object, levels: int = 8) -> Iterator[tuple[str, object]]:
    """Yield what lies in dicts inside one another, such as a trainer's ``{"model": {...}}``, by dotted names.

    A dict that has several names is walked once, and a name of more than 500 letters is refused: a small file
    could say very many, and very long ones.
    """
    level, visited = [("", stored)], set[int]()
    for _ in range(levels):
        below: list[tuple[str, object]] = []
        for prefix, parent in level:
            for key, child in parent.items() if isinstance(parent, dict) else ():
                name = f"{prefix}{key}" if isinstance(key, str | int) else ""
                if len(name) > _LONGEST_NAME:
                    expected = f"a name of at most {_LONGEST_NAME} letters"
                    raise BadInput(where, shown(name), expected=expected, found=f"one of {len(name):,}")
                if name:
                    yield name, child
                if name and isinstance(child, dict) and id(child) not in visited:
                    visited.add(id(child))
                    below.append((f"{name}.", child))
        level = below
