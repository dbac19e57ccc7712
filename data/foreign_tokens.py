"""Make a token file of another program's token ids without a copy: only the index beside them is written.

Megatron's ``.bin`` and datatrove's ``.ds`` hold little-endian ids end to end, as ``<name>.bin`` does. One
pass over them gives what a token file has more: that every id is below the vocabulary's size, and the hashes
and checksums by which damage is found later.

datatrove, on which nanotron trains, writes ``NAME.ds`` of uint16 or uint32 ids, ``NAME.ds.index`` with where
each document ends (uint64), and ``NAME.ds.metadata`` with the name of the tokenizer and the bytes of an id,
and the number of ids.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..parallel_state import BadInput, from_os_error, require
from ..storage.output_places import check_place
from ..storage.safe_open import open_regular, stat_regular
from ..storage.small_files import read_text
from ..storage.staging import Staging
from .token_file import TokenFile, publish_tokens, refuse_taken
from .token_index import TokenPaths, dtype_for, little_endian
from .token_sums import FileHashes

#: Bytes read at once: a multiple of every id's size.
_PART = 2**22


@dataclass(frozen=True, slots=True)
class ForeignTokens:
    """Describe a file of ids: ``offsets`` has the first id of each document, and the number of all ids."""

    path: Path
    dtype: Literal["uint16", "uint32"]
    offsets: NDArray[np.int64]

    @property
    def size(self) -> int:
        """Return the number of bytes that the ids take."""
        return int(self.offsets[-1]) * little_endian(self.dtype).itemsize


def offsets_of_ends(ends: NDArray[np.int64], where: Path) -> NDArray[np.int64]:
    """Return the offsets of documents that end at ``ends``, which must not fall; empty ones are left out."""
    offsets = np.concatenate([np.zeros(1, dtype="<i8"), ends])
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        at = int(np.argmax(falls))
        expected = f"an end of at least {offsets[at]}, where the one before it ends"
        raise BadInput(where, f"document {at}", expected=expected, found=offsets[at + 1])
    not_empty: NDArray[np.int64] = offsets[np.concatenate([[True], offsets[1:] > offsets[:-1]])]
    require(len(not_empty) != 1, where, "documents", "at least one with tokens", "none")
    return not_empty


def index_tokens(
    foreign: ForeignTokens,
    out: Path,
    *,
    vocab_size: int,
    eos_id: int | None = None,
    bos_id: int | None = None,
    tokenizer_fingerprint: str = "",
    on_progress: Callable[[int], None] = lambda read: None,
) -> TokenFile:
    """Write the token file ``out`` around these ids, and open it.

    ``out.bin`` becomes a link to them, unless it is their file. ``bos_id`` is noted in the index if every
    document begins with it. ``on_progress`` is called with the number of bytes read since its last call.
    Raises ``BadInput`` for an id that is not below ``vocab_size``, and for a name that is taken.
    """
    if foreign.dtype == "uint16" != dtype_for(vocab_size):
        expected = f"4 bytes for each, for a vocabulary of {vocab_size}"
        todo = "Name the tokenizer that made the file"
        raise BadInput(foreign.path, "ids", expected=expected, found="2 bytes", todo=todo)
    paths, outputs = TokenPaths.of(out), outputs_of(foreign, out)
    in_place = paths.tokens not in outputs
    check_place(paths.name)
    # Beside tokens that were there before, under a name of its own: what a kill leaves there must not look
    # like an unfinished ``out``, whose ``.bin`` the next writer may replace.
    staged_as = paths.index if in_place else paths.name
    staging = Staging.begin(staged_as, partial(refuse_taken, staged_as, paths.index, outputs))
    try:
        hashes, begun = FileHashes(), 0
        for at, ids in _parts(foreign):
            _check_ids(ids, at, vocab_size, foreign.path)
            hashes.update(ids.data)
            first, last = np.searchsorted(foreign.offsets[:-1], [at, at + ids.size])
            if bos_id is not None:
                begun += int(np.count_nonzero(ids[foreign.offsets[first:last] - at] == bos_id))
            on_progress(ids.nbytes)
        places = {}
        if not in_place:
            # A relative path, so that a folder with both can be moved as one.
            target = os.path.relpath(os.path.realpath(foreign.path), os.path.realpath(paths.tokens.parent))
            os.symlink(target, staging.directory / "tokens")
            places["tokens"] = paths.tokens
        return publish_tokens(
            staging, paths, foreign.offsets, [hashes], places,
            dtype=foreign.dtype, vocab_size=vocab_size, tokenizer_fingerprint=tokenizer_fingerprint,
            eos_id=eos_id, bos_id=bos_id if begun == len(foreign.offsets) - 1 else None,
        )  # fmt: skip
    finally:
        staging.abandon()


def indexed_before(foreign: ForeignTokens, out: Path, **facts: object) -> TokenFile | None:
    """Return the token file ``out`` if it is complete and around these ids, with these facts in its index: a
    command for several files that was killed goes on behind it.
    """
    paths = TokenPaths.of(out)
    if not (paths.index.exists() and paths.tokens.exists() and paths.tokens.samefile(foreign.path)):
        return None
    file = TokenFile.open(out)
    same = all(getattr(file.index, name) == fact for name, fact in facts.items())
    return file if same and np.array_equal(file.documents, foreign.offsets) else None


def outputs_of(foreign: ForeignTokens, out: Path) -> list[Path]:
    """Return the files that the token file ``out`` may have beside these ids, the index first."""
    paths = TokenPaths.of(out)
    in_place = paths.tokens.exists() and paths.tokens.samefile(foreign.path)
    return [path for path in paths.all if not (in_place and path in (paths.tokens, paths.megatron))]


def _parts(foreign: ForeignTokens) -> Iterator[tuple[int, NDArray[np.unsignedinteger]]]:
    """Yield all ids in pieces, each with the number of its first id."""
    dtype, offset = little_endian(foreign.dtype), 0
    with open_regular(foreign.path) as (fd, _):
        while offset < foreign.size:
            try:
                part = os.pread(fd, min(_PART, foreign.size - offset), offset)
            except OSError as error:
                raise from_os_error(error, foreign.path, expected="a readable file", kind=BadInput) from None
            if not part or len(part) % dtype.itemsize:
                expected = f"{foreign.size} bytes"
                raise BadInput(foreign.path, "size", expected=expected, found="a file that shrinks")
            yield offset // dtype.itemsize, np.frombuffer(part, dtype)
            offset += len(part)


def _check_ids(ids: NDArray[np.unsignedinteger], at: int, vocab_size: int, where: Path) -> None:
    if ids.max() >= vocab_size:
        first = int(np.argmax(ids >= vocab_size))
        id = int(ids[first])
        id -= 2**32 if id >= 2**31 else 0  # Megatron's ids have a sign
        expected = f"0 to {vocab_size - 1}, the tokenizer's ids"
        todo = "Name the tokenizer that made the file"
        raise BadInput(where, f"token {at + first}", expected=expected, found=id, todo=todo)


def datatrove_files(path: Path) -> list[Path]:
    """Return the ``.ds`` files of a folder, in the order of their names; a file stands for itself."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.ds"))
    require(files, path, None, "a folder with .ds files", "none in it")
    return files


def read_datatrove(path: Path) -> ForeignTokens:
    """Describe the ids of a ``.ds`` file by the files beside it.

    Raises ``BadInput`` if these do not fit each other, and for a loss mask, which is not read.
    """
    index, metadata, loss = (path.with_name(path.name + end) for end in (".index", ".metadata", ".loss"))
    size = stat_regular(path).st_size
    ends_size = stat_regular(index, todo="Tokenize with save_index=True").st_size
    todo = "trilith tokenize --chat makes one"
    require(not loss.exists(), loss, None, "no mask of the loss: every token is learnt here", "one", todo)
    if not ends_size or ends_size % 8:
        raise BadInput(index, "size", expected="8 bytes for each document", found=ends_size)
    offsets = offsets_of_ends(np.fromfile(index, dtype="<i8"), index)
    count = int(offsets[-1])
    dtype: Literal["uint16", "uint32"] = "uint16" if size == 2 * count else "uint32"
    expected = f"2 or 4 bytes for each of {count} ids, as {index.name} says"
    require(size in (2 * count, 4 * count), path, "size", expected, size, "Copy it again")
    if metadata.exists():
        _check_metadata(read_text(metadata).splitlines(), size // count, count, metadata)
    return ForeignTokens(path, dtype, offsets)


def _check_metadata(lines: list[str], itemsize: int, count: int, where: Path) -> None:
    """Compare the lines ``tokenizer|bytes of an id`` (once without bytes) and the number of ids."""
    _, bar, bytes_said = lines[0].rpartition("|") if lines else ("", "", "")
    for key, expected, stored in (
        ("bytes of an id", itemsize, bytes_said if bar else str(itemsize)),
        ("ids", count, lines[1] if len(lines) > 1 else "nothing"),
    ):
        require(stored == str(expected), where, key, f"{expected}, as the other files say", stored)
