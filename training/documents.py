"""Documents from files: cut into blocks by one reader, taken apart by many workers.

The reader cuts bytes at places where a document cannot go on (a line end in JSON lines, a blank line between
paragraphs), so the documents do not depend on where the cuts fall.
"""

from __future__ import annotations

import gzip
import importlib
import json
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

from ..parallel_state import BadInput

#: A document is tokenized whole, in memory, so it has a largest size. Unit: bytes.
LARGEST_DOCUMENT = 2**28

_BLOCK = 2**20
_ROWS = 1024

Kind = Literal["text", "paragraphs", "lines", "rows"]


@dataclass(frozen=True, slots=True)
class Block:
    """One worker's portion. ``first`` is the number of its first line (or row) in the file, from 1."""

    path: Path
    kind: Kind
    first: int
    data: bytes | list[Any]
    position: int  # how many bytes of the file, as stored, have been read so far


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def check_inputs(paths: list[Path]) -> int:
    """Refuse inputs that are missing, of an unknown kind, or need an absent package. Returns their bytes."""
    if not paths:
        raise BadInput("input", expected="at least one file", found="none")
    total = 0
    for path in paths:
        try:
            state = path.stat()
        except OSError as error:
            raise BadInput(path, expected="a file", found=error.strerror) from error
        if not stat.S_ISREG(state.st_mode):
            raise BadInput(
                path, expected="a regular file", found="a folder or device", todo="Name the files in it"
            )
        total += state.st_size
        if path.name.endswith(".parquet"):
            _need("pyarrow", path)
        if path.name.endswith(".zst"):
            _need("zstandard", path)
        if _inner_name(path).endswith(".json"):
            raise BadInput(
                path, expected=".jsonl, .txt or .parquet", found=".json", todo="Write one object a line"
            )
    return total


def read_blocks(path: Path, *, split_paragraphs: bool, json_key: str, size: int = _BLOCK) -> Iterator[Block]:
    """The file's blocks in order, of about ``size`` bytes unless a document is longer."""
    if path.name.endswith(".parquet"):
        yield from _read_parquet(path, json_key)
        return
    kind: Kind = "paragraphs" if split_paragraphs else "text"
    if _inner_name(path).endswith(".jsonl"):
        kind = "lines"
    end = {"lines": _end_of_line, "paragraphs": _end_of_paragraph, "text": lambda data: 0}[kind]
    with path.open("rb") as raw:
        first = 1
        try:
            for data in _cut(_decompressed(path, raw), size, end, path):
                yield Block(path, kind, first, data, raw.tell())
                first += data.count(b"\n")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BadInput(path, expected="a whole compressed file", found=str(error)) from error


def documents_of(block: Block, json_key: str) -> Iterator[tuple[str, str]]:
    """The block's documents, none of them empty, each with where it stands (``file:line``)."""
    texts: Iterator[tuple[int, str]]
    if block.kind == "rows":
        rows: list[tuple[int, Any]] = list(enumerate(cast("list[Any]", block.data), block.first))
        texts = ((row, _text(f"{block.path}:{row}", json_key, value)) for row, value in rows)
    elif block.kind == "lines":
        texts = _json_texts(block, cast("bytes", block.data), json_key)
    else:
        text = _decode(block, cast("bytes", block.data), block.first)
        texts = _paragraphs(text, block.first) if block.kind == "paragraphs" else iter([(block.first, text)])
    for line, text in texts:
        if text:
            yield f"{block.path}:{line}", text


def _paragraphs(text: str, first: int) -> Iterator[tuple[int, str]]:
    """Runs of lines that are not blank, without the line end of the last."""
    lines: list[str] = []
    for number, line in enumerate([*text.split("\n"), ""], first):
        if line.strip(" \t\r"):
            lines.append(line)
        elif lines:
            yield number - len(lines), "\n".join(lines).removesuffix("\r")
            lines = []


def _json_texts(block: Block, data: bytes, key: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(data.split(b"\n"), block.first):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        where = f"{block.path}:{number}"
        try:
            record = json.loads(_decode(block, line, number))
        except (json.JSONDecodeError, RecursionError) as error:
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, ValueError) else "nesting"
            raise BadInput(where, expected="one JSON object", found=reason) from error
        if not isinstance(record, dict) or key not in record:
            found = f"the keys {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
            raise BadInput(
                where, expected=f"an object with {key!r}", found=found, todo="Name its text with --json-key"
            )
        yield number, _text(where, key, record[key])


def _text(where: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadInput(where, key, expected="text", found=f"{value!r:.80}")
    return value


def _decode(block: Block, data: bytes, first: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = first + data.count(b"\n", 0, error.start)
        raise BadInput(
            f"{block.path}:{line}", expected="UTF-8", found=f"byte {data[error.start]:#04x}"
        ) from error


def _cut(stream: _Stream, size: int, end: Callable[[bytes], int], path: Path) -> Iterator[bytes]:
    """The stream in pieces that each end where ``end(piece)`` says that a document may end (0: nowhere)."""
    held, more = b"", size
    while data := stream.read(more):
        held += data
        if cut := end(held):
            yield held[:cut]
            held, more = held[cut:], size
        else:
            more = len(held)  # double, so that a long document is not searched over and over
        if len(held) > LARGEST_DOCUMENT:
            raise BadInput(
                path,
                "document",
                expected=f"at most {LARGEST_DOCUMENT} bytes",
                found="a longer one",
                todo="Split the file, or its paragraphs with --split-paragraphs",
            )
    if held:
        yield held


def _end_of_line(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def _end_of_paragraph(data: bytes) -> int:
    """After the last blank line."""
    end = len(data)
    while (end := data.rfind(b"\n", 0, end)) >= 0:
        start = data.rfind(b"\n", 0, end) + 1
        if not data[start:end].strip(b" \t\r") and start:
            return end + 1
    return 0


def _inner_name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".zst")


def _decompressed(path: Path, raw: BinaryIO) -> _Stream:
    if path.name.endswith(".gz"):
        return cast(_Stream, gzip.GzipFile(fileobj=raw))
    if path.name.endswith(".zst"):
        return _Zstandard(path, raw)
    return raw


class _Zstandard:
    """A .zst file of one or more frames. The package's own reader takes a file cut short for a whole one."""

    def __init__(self, path: Path, raw: BinaryIO) -> None:
        self._package = _need("zstandard", path)
        self._path, self._raw = path, raw
        self._frame, self._packed, self._begun = self._new_frame(), b"", False

    def read(self, size: int, /) -> bytes:
        """Some bytes, near ``size`` or not; none at the end."""
        while packed := self._packed or self._raw.read(min(size, _BLOCK)):
            self._packed = b""
            try:
                data: bytes = self._frame.decompress(packed)
            except self._package.ZstdError as error:
                raise BadInput(self._path, expected="a zstandard file", found=str(error)) from error
            self._begun = not self._frame.eof
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, self._new_frame()
            if data:
                return data
        if self._begun:
            raise BadInput(self._path, expected="a whole zstandard file", found="one that is cut short")
        return b""

    def _new_frame(self) -> Any:
        return self._package.ZstdDecompressor().decompressobj()


def _read_parquet(path: Path, column: str) -> Iterator[Block]:
    _need("pyarrow", path)
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
        if column not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise BadInput(
                path, f"column {column!r}", found=f"the columns {names}", todo="Name one with --json-key"
            )
        size, done, rows = path.stat().st_size, 0, max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
            values = batch.column(0).to_pylist()
            yield Block(path, "rows", done + 1, values, size * (done + len(values)) // rows)
            done += len(values)
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(path, expected="a Parquet file", found=" ".join(str(error).split())[:200]) from error


def _need(package: str, path: Path) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise BadInput(
            path,
            expected=f"the {package} package to read it",
            found="none",
            todo="pip install 'trilith[data]'",
        ) from error
