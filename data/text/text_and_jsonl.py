"""Read documents from text and JSONL files: one reader cuts blocks, many workers take them apart.

The reader cuts bytes at places where a document cannot go on (a line end in JSON lines, a blank line between
paragraphs), so the documents do not depend on where the cuts fall.
"""

import codecs
import functools
import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from ...parallel_state import BadInput, require
from ...storage.safe_open import stat_regular
from ...storage.strict_json import SAVE_AS_UTF8, parse_object, what_it_looks_like
from .parquet_and_arrow import dataset_files, need, read_rows
from .tokenizer_loading import LARGEST_TEXT

#: No document has more bytes, for none may have more characters than are tokenized at once.
LARGEST_DOCUMENT = 4 * LARGEST_TEXT

#: A file is not text if it unpacks to more than this many times its size, and to more than this many bytes.
#: Gzip reaches at most 1032 times.
MOST_UNPACKED, UNPACKED_FREELY = 1100, 2**26

#: Endings of files that are no texts, and what to do.
NO_TEXTS = {
    ".json": "Write one object a line",
    ".toml": "A recipe is for trilith train; a text to learn ends in .txt",
}
#: The keys that a record of a chat set may have; a table's other columns are not read.
CHAT_KEYS = (
    *("messages", "conversations", "prompt", "completion", "instruction", "input", "output"),
    *("system", "tools"),
)

_BLOCK = 2**20
_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")

Kind = Literal["text", "paragraphs", "lines", "rows"]


@dataclass(frozen=True, slots=True)
class Block:
    """Hold one worker's portion. ``first`` is the number of its first line (or row) in the file, from 1."""

    path: Path
    kind: Kind
    first: int
    data: bytes | list[dict[str, Any]]
    position: int  # how many bytes of the file, as stored, have been read so far


def check_inputs(paths: list[Path], *, chat: bool = False) -> int:
    """Refuse inputs that are missing, of an unknown kind, or need an absent package. Returns their bytes.

    A chat set has records: running text is refused.
    """
    require(paths, "input", None, "at least one file", "none")
    total = 0
    for path in paths:
        if path.is_dir():
            total += input_size(path)
            need("pyarrow", path)
            continue
        total += stat_regular(path).st_size
        if path.name.endswith((".parquet", ".zst")):
            need("pyarrow", path)
        if (ending := Path(_inner_name(path)).suffix) in NO_TEXTS:
            raise BadInput(path, expected=".jsonl, .txt or .parquet", found=ending, todo=NO_TEXTS[ending])
        if chat and not _inner_name(path).endswith((".jsonl", ".parquet")):
            raise BadInput(path, expected="conversations in .jsonl or .parquet", found="another kind of file")
    return total


def input_size(path: Path) -> int:
    """Return the bytes of a file, or of the files of a data set's folder."""
    return sum(file.stat().st_size for file in (dataset_files(path) if path.is_dir() else [path]))


def read_blocks(
    path: Path, *, split_paragraphs: bool, json_key: str, chat: bool = False, size: int = _BLOCK
) -> Iterator[Block]:
    """Yield the file's blocks in order, of about ``size`` bytes unless a document is longer."""
    if path.is_dir() or path.name.endswith(".parquet"):
        choose = functools.partial(_columns, None if chat else json_key)
        first = 1
        for rows, position in read_rows(path, choose):
            yield Block(path, "rows", first, rows, position)
            first += len(rows)
        return
    kind: Kind = "paragraphs" if split_paragraphs else "text"
    if _inner_name(path).endswith(".jsonl"):
        kind = "lines"
    end = {
        "lines": lambda data: data.rfind(b"\n") + 1,
        "paragraphs": lambda data: max((match.end() for match in _BLANK_LINES.finditer(data)), default=0),
        "text": lambda data: 0,
    }[kind]
    with path.open("rb") as raw:
        first, unpacked = 1, 0
        try:
            for data in _cut(_decompressed(path, raw), size, end, path):
                unpacked += len(data)
                if unpacked > max(UNPACKED_FREELY, MOST_UNPACKED * raw.tell()):
                    expected = f"a file that unpacks to at most {MOST_UNPACKED} times its size"
                    raise BadInput(path, expected=expected, found="one that unpacks to more")
                text = data.removeprefix(codecs.BOM_UTF8) if first == 1 else data
                yield Block(path, kind, first, text, raw.tell())
                first += data.count(b"\n")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BadInput(path, expected="a whole compressed file", found=str(error)) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise BadInput(path, expected="a whole zstandard file", found=str(error)) from error  # pyarrow's


def documents_of(block: Block, json_key: str) -> Iterator[tuple[str, str]]:
    """Yield the block's documents that are not empty, each with its place (``file:line``)."""
    texts: Iterator[tuple[str, str]]
    if block.kind in ("rows", "lines"):
        texts = ((where, _text(where, json_key, record)) for where, record in records_of(block))
    else:
        text = _decode(block, cast("bytes", block.data), block.first)
        pieces = _paragraphs(text, block.first) if block.kind == "paragraphs" else iter([(block.first, text)])
        texts = ((f"{block.path}:{line}", text) for line, text in pieces)
    for where, text in texts:
        if text:
            yield where, text


def paragraphs_of(paths: list[Path], json_key: str) -> Iterator[str]:
    """Yield the inputs' text in pieces between blank lines, whitespace kept, to train a tokenizer on."""
    for path in paths:
        for block in read_blocks(path, split_paragraphs=False, json_key=json_key):
            for _, text in documents_of(block, json_key):
                yield from (part for part in text.split("\n\n") if part.strip())


def records_of(block: Block) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the block's JSON objects or table rows, each with its place (``file:line``)."""
    if block.kind == "rows":
        for row, record in enumerate(cast("list[dict[str, Any]]", block.data), block.first):
            yield f"{block.path}:{row}", record
        return
    for number, line in enumerate(cast("bytes", block.data).split(b"\n"), block.first):
        if not line.strip():
            continue
        where = f"{block.path}:{number}"
        yield where, parse_object(line, where, constants=True)


def _paragraphs(text: str, first: int) -> Iterator[tuple[int, str]]:
    """Yield runs of lines that are not blank, each without its last line end."""
    lines: list[str] = []
    for number, line in enumerate([*text.split("\n"), ""], first):
        if line.strip(" \t\r"):
            lines.append(line)
        elif lines:
            yield number - len(lines), "\n".join(lines).removesuffix("\r")
            lines = []


def _text(where: str, key: str, record: dict[str, Any]) -> str:
    if key not in record:
        is_chat = {"messages", "conversations"} & {*record}
        todo = "These are chats: give --chat" if is_chat else "Name its text with --json-key"
        keys = f"the keys {', '.join(record)}"
        raise BadInput(where, expected=f"an object with {key!r}", found=keys, todo=todo)
    value = record[key]
    if not isinstance(value, str):
        actual = "null" if value is None else f"{value!r:.80}"
        raise BadInput(where, key, expected="text", found=actual, todo="Leave such records out")
    return value


def _columns(key: str | None, names: list[str], path: Path) -> list[str]:
    """Return the columns to read: the one of the text, or those of a chat set."""
    if key is None:
        return [name for name in names if name in CHAT_KEYS]
    if key not in names:
        columns = f"the columns {', '.join(names)}"
        raise BadInput(path, f"column {key!r}", found=columns, todo="Name one with --json-key")
    return [key]


def _decode(block: Block, data: bytes, first: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = first + data.count(b"\n", 0, error.start)
        where, bad_byte = f"{block.path}:{line}", f"byte {data[error.start]:#04x}"
        todo = what_it_looks_like(data) or SAVE_AS_UTF8
        raise BadInput(where, expected="UTF-8", found=bad_byte, todo=todo) from error


def _cut(stream: BinaryIO, size: int, end: Callable[[bytes], int], path: Path) -> Iterator[bytes]:
    """Cut the stream into pieces that end where ``end(piece)`` says that a document may end (0: nowhere)."""
    buffer, length = b"", size
    while data := stream.read(length):
        buffer += data
        if cut := end(buffer):
            yield buffer[:cut]
            buffer, length = buffer[cut:], size
        else:
            length = len(buffer)  # double, so that a long document is not searched over and over
        fits = len(buffer) <= LARGEST_DOCUMENT
        todo = "Split the file, or its paragraphs with --split-paragraphs"
        require(fits, path, "document", f"at most {LARGEST_DOCUMENT} bytes", "a longer one", todo)
    if buffer:
        yield buffer


def _inner_name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".zst")


def _decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.name.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if path.name.endswith(".zst"):
        pyarrow = need("pyarrow", path)
        return cast(BinaryIO, pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"))
    return raw
