"""Read and write Megatron's ``.idx``, which says where the documents are in a ``.bin`` of token ids.

The format of Megatron-Core's ``IndexedDataset``, little-endian: the magic, a version, a code for the type of
an id, the numbers of sequences and of document bounds; then for each sequence its length (int32), its first
byte in the ``.bin`` (int64); then the bounds of documents, counted in sequences (int64); and for data of
several kinds a mode for each sequence (int8). ``GPTDataset`` reads a sequence for a document; here, as in
``preprocess_data.py --split-sentences``, a document may have several.
"""

import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..parallel_state import BadInput, require
from ..storage.safe_open import open_regular, stat_regular
from .foreign_tokens import ForeignTokens, offsets_of_ends
from .token_index import TokenPaths, little_endian

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_LENGTH, _POINTER = np.dtype("<i4"), np.dtype("<i8")
#: What the types of an id are called, by their code, and those that are read without a copy: an int32 that is
#: not negative has the bits of a uint32.
_TYPES = ("none", "uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
_CODES = {"uint32": 4, "uint16": 8}


def read_megatron(prefix: Path) -> ForeignTokens:
    """Describe the ids of ``prefix.bin`` by ``prefix.idx``; either file's path may be given instead.

    Raises ``BadInput`` if the two do not fit each other, or hold what is no text.
    """
    paths = TokenPaths.of(prefix)
    where = paths.megatron
    todo = "Name the data set by its prefix, the path without .bin and .idx"
    stat_regular(where, todo=todo)
    tokens = stat_regular(paths.tokens, todo=todo).st_size
    with open_regular(where) as (fd, status):
        dtype, sequences, bounds = _read_header(os.pread(fd, _HEADER.size, 0), where)
        size = _HEADER.size + sequences * (_LENGTH.itemsize + _POINTER.itemsize) + bounds * _POINTER.itemsize
        if status.st_size not in (size, size + sequences):
            expected = f"{size} bytes for {sequences} sequences and {bounds} bounds of documents"
            raise BadInput(where, "size", expected=expected, found=status.st_size, todo="Copy it again")
    lengths = np.memmap(where, _LENGTH, "r", _HEADER.size, (sequences,))
    pointers = np.memmap(where, _POINTER, "r", _HEADER.size + lengths.nbytes, (sequences,))
    documents = np.memmap(where, _POINTER, "r", _HEADER.size + lengths.nbytes + pointers.nbytes, (bounds,))
    if status.st_size > size and (modes := np.memmap(where, np.int8, "r", size, (sequences,))).any():
        at = int(np.flatnonzero(modes)[0])  # a mode tells the pictures from the words
        mode = f"mode {modes[at]}: a data set of several kinds"
        raise BadInput(where, f"sequence {at}", expected="mode 0, text", found=mode)
    itemsize = little_endian(dtype).itemsize
    end = _check_sequences(lengths, pointers, itemsize, where)
    expected = f"{end * itemsize} bytes, {end} ids of {itemsize} bytes, as {where.name} says"
    require(tokens == end * itemsize, paths.tokens, "size", expected, tokens, "Copy it again")
    return ForeignTokens(paths.tokens, dtype, _offsets(documents, pointers, itemsize, end, where))


def _read_header(header: bytes, where: Path) -> tuple[Any, int, int]:
    """Return the type of an id and the numbers of sequences and of bounds."""
    if not header.startswith(_MAGIC):
        old = header.startswith(_OLD_MAGIC)
        magic = "the older format of cached data sets" if old else repr(header[: len(_MAGIC)])
        todo = "Preprocess the text again, with today's Megatron or with trilith tokenize" if old else ""
        raise BadInput(where, "magic", expected=f"{_MAGIC!r}, Megatron's index", found=magic, todo=todo)
    expected = f"at least {_HEADER.size} bytes, a whole header"
    require(len(header) >= _HEADER.size, where, "size", expected, len(header), "Copy it again")
    _, version, code, sequences, bounds = _HEADER.unpack(header)
    require(version == 1, where, "version", 1, version)
    dtype = next((name for name, dtype_code in _CODES.items() if dtype_code == code), None)
    if dtype is None:
        type_name = _TYPES[code] if code < len(_TYPES) else f"code {code}"
        raise BadInput(
            where, "type of the ids", expected="uint16 or int32", found=type_name, todo="Tokenize again"
        )
    actual = f"{sequences} sequences, {bounds} bounds of documents"
    require(sequences and bounds >= 2, where, None, "at least one sequence and two bounds", actual)
    return dtype, sequences, bounds


def _check_sequences(
    lengths: NDArray[np.int32], pointers: NDArray[np.int64], itemsize: int, where: Path
) -> int:
    """Check that the sequences lie end to end from the first byte on, and return the number of ids."""
    if lengths.min() < 0:
        at = int(np.argmax(lengths < 0))
        raise BadInput(where, f"length of sequence {at}", expected="at least 0", found=lengths[at])
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = (ends - lengths) * itemsize
    wrong = starts != pointers
    if wrong.any():
        at = int(np.argmax(wrong))
        expected = f"{starts[at]}, the byte after the sequence before it"
        raise BadInput(where, f"pointer of sequence {at}", expected=expected, found=pointers[at])
    return int(ends[-1])


def _offsets(
    bounds: NDArray[np.int64], pointers: NDArray[np.int64], itemsize: int, end: int, where: Path
) -> NDArray[np.int64]:
    """Return where documents begin, in ids, and where the last one ends."""
    if bounds[0] != 0 or bounds[-1] != len(pointers):
        expected = f"0 to {len(pointers)}"
        raise BadInput(where, "bounds of documents", expected=expected, found=f"{bounds[0]} to {bounds[-1]}")
    falls = np.flatnonzero(bounds[1:] < bounds[:-1])
    if falls.size:
        at = int(falls[0])
        expected, place = f"at least {bounds[at]}, as bounds rise", f"bound {at + 1} of documents"
        raise BadInput(where, place, expected=expected, found=bounds[at + 1])
    ends = np.asarray(pointers[np.minimum(bounds[1:], len(pointers) - 1)])
    ends //= itemsize
    ends[bounds[1:] == len(pointers)] = end  # no sequence begins behind the last document
    return offsets_of_ends(ends, where)


def check_for_megatron(vocab_size: int, *, chat: bool) -> None:
    """Refuse what Megatron's files cannot hold."""
    if chat:
        expected, chats = "text: it learns every token", "conversations, of which some tokens are learnt"
        raise BadInput("tokenize", "--to megatron", expected=expected, found=chats)
    fits = vocab_size <= 2**31
    require(fits, "tokenize", "--to megatron", "a vocabulary of at most 2**31: its ids are int32", vocab_size)


def write_megatron_index(file: IO[bytes], offsets: NDArray[np.int64], dtype: np.dtype[Any]) -> None:
    """Write the ``.idx`` of documents that are one sequence each, as ``IndexedDatasetBuilder`` does."""
    lengths = np.diff(offsets)
    if lengths.max() >= 2**31:
        expected = "fewer than 2**31 tokens: Megatron's lengths are int32"
        raise BadInput("document", int(np.argmax(lengths)), expected=expected, found=lengths.max())
    file.write(_HEADER.pack(_MAGIC, 1, _CODES[dtype.name], len(lengths), len(offsets)))
    file.write(lengths.astype(_LENGTH).data)
    file.write((offsets[:-1] * dtype.itemsize).astype(_POINTER).data)
    file.write(np.arange(len(offsets), dtype=_POINTER).data)


def parse_blend(words: Sequence[str], where: object) -> tuple[list[str], list[float] | None]:
    """Return the prefixes and the weights of Megatron's ``--data-path``: ``0.3 a 0.7 b``, or ``a b``.

    As in Megatron, words in pairs are weights and prefixes if every first word is a number. ``None``: no
    weights are given.
    """
    require(words, where, "data path", "at least one prefix", "none")
    weights = [_weight(word) for word in words[::2]]
    if len(words) % 2 or all(weight is None for weight in weights):
        return [*words], None
    if None in weights:
        at = 2 * weights.index(None)
        raise BadInput(where, "data path", expected=f"a weight before {words[at + 1]}", found=words[at])
    numbers = [weight for weight in weights if weight is not None]
    if not all(0 < weight < math.inf for weight in numbers):
        raise BadInput(where, "data path", expected="finite weights above 0", found=" ".join(words[::2]))
    return [*words[1::2]], numbers


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
