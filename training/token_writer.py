"""Write a token file: stream documents in, commit by rename, one writer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..parallel_state import BadInput
from .token_index import VERSION, TokenIndex, TokenPaths, dtype_for, little_endian, probe
from .tokens import TokenFile


class TokenWriter:
    """A context that builds ``<name>.bin``, ``.docs.npy`` and ``.json`` in ``<name>.partial/``.

    ``commit`` makes them durable and moves them into place, the index last. Leaving without it leaves
    nothing. A second writer of the same name is refused while the first is alive, and after it because the
    name is taken. What a killed writer left is cleared by the next one.
    """

    def __init__(
        self, name: str | Path, *, vocab_size: int, eos_id: int | None = None, tokenizer_fingerprint: str = ""
    ) -> None:
        self._paths = TokenPaths.of(name)
        self._partial = self._paths.name.with_name(self._paths.name.name + ".partial")
        self._vocab_size, self._eos_id, self._fingerprint = vocab_size, eos_id, tokenizer_fingerprint
        if not 1 <= vocab_size <= 2**32:
            raise BadInput(self._paths.index, "vocab_size", expected="1 to 2**32", found=vocab_size)
        self._dtype = little_endian(dtype_for(vocab_size))
        self._digest = hashlib.sha256()
        self._lengths: list[NDArray[np.int64]] = []
        self._count = 0

    def __enter__(self) -> TokenWriter:
        self._refuse_taken_name()
        parent = self._partial.parent
        if not parent.exists() and not parent.parent.is_dir():
            raise BadInput(parent, expected="a folder, or a place for one", found="nothing there")
        self._made_parent = not parent.exists()
        parent.mkdir(exist_ok=True)
        self._lock = _take(self._partial)
        try:
            # Asked again: another writer may have finished between the first look and the lock.
            self._refuse_taken_name(held=True)
            self._file = (self._partial / "tokens").open("wb")
        except BaseException:
            self._clear()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        self._clear()

    def add(self, ids: ArrayLike) -> None:
        """One document, one or more ids."""
        ids = np.asarray(ids)
        self.add_documents(ids, np.array([ids.size]))

    def add_documents(self, ids: ArrayLike, lengths: ArrayLike) -> None:
        """Several documents end to end, and how many ids each has (at least one)."""
        ids, lengths = np.asarray(ids), np.asarray(lengths, dtype=np.int64)
        assert ids.ndim == lengths.ndim == 1 and ids.size == lengths.sum(), "lengths do not add up to the ids"
        assert lengths.size == 0 or lengths.min() > 0, "an empty document"
        if not ids.size:
            return
        if not np.issubdtype(ids.dtype, np.integer):
            raise BadInput(self._paths.tokens, "ids", expected="whole numbers", found=ids.dtype)
        for extreme in (ids.min(), ids.max()):
            if not 0 <= extreme < self._vocab_size:
                raise BadInput(
                    self._paths.tokens, "id", expected=f"0 to {self._vocab_size - 1}", found=extreme
                )
        data = np.ascontiguousarray(ids, dtype=self._dtype)
        self._file.write(data.data)
        self._digest.update(data.data)
        self._lengths.append(lengths)
        self._count += ids.size

    def commit(self) -> TokenFile:
        """Put the three files in place and open them. ``BadInput`` where there is no token."""
        if not self._count:
            raise BadInput(self._paths.tokens, "tokens", expected="at least one", found="none in the input")
        _sync(self._file)
        lengths = np.concatenate(self._lengths)
        offsets = np.zeros(lengths.size + 1, dtype="<i8")
        np.cumsum(lengths, out=offsets[1:])
        with (self._partial / "documents").open("wb+") as file:
            np.save(file, offsets, allow_pickle=False)
            _sync(file)
            file.seek(0)
            documents_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        index = TokenIndex(
            version=VERSION,
            dtype=dtype_for(self._vocab_size),
            tokens=self._count,
            documents=lengths.size,
            vocab_size=self._vocab_size,
            eos_id=self._eos_id,
            tokenizer_fingerprint=self._fingerprint,
            sha256=self._digest.hexdigest(),
            probe=probe(self._partial / "tokens"),
            documents_sha256=documents_sha256,
        )
        with (self._partial / "index").open("wb") as file:
            file.write(json.dumps(index.model_dump(), indent=2).encode() + b"\n")
            _sync(file)
        (self._partial / "tokens").rename(self._paths.tokens)
        (self._partial / "documents").rename(self._paths.documents)
        _sync_folder(self._partial.parent)
        (self._partial / "index").rename(self._paths.index)
        _sync_folder(self._partial.parent)
        return TokenFile.open(self._paths.name)

    def _refuse_taken_name(self, *, held: bool = False) -> None:
        """An index says that the name is taken. With no ``.partial`` beside them, so do the other files."""
        ours = held or self._partial.exists()
        taken = (
            [self._paths.index] if ours else [self._paths.index, self._paths.tokens, self._paths.documents]
        )
        for path in taken:
            if path.exists() or path.is_symlink():
                raise BadInput(
                    path, expected="a new name", found="an existing file", todo="Remove it or choose another"
                )

    def _clear(self) -> None:
        """Remove what a writer makes, the lock last, and nothing that somebody else put there."""
        for name in ("tokens", "documents", "index", "lock"):
            (self._partial / name).unlink(missing_ok=True)
        os.close(self._lock)
        with contextlib.suppress(OSError):  # not empty: another writer has just begun, or a stranger's file
            self._partial.rmdir()
            if self._made_parent:
                self._partial.parent.rmdir()


def _take(partial: Path) -> int:
    """Make the folder and hold the lock in it, which the system frees however this process ends."""
    while True:
        partial.mkdir(exist_ok=True)
        try:
            lock = os.open(partial / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # another writer cleared the folder just now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.path.samestat(os.fstat(lock), os.stat(partial / "lock"))
        except BlockingIOError:
            os.close(lock)
            raise BadInput(
                partial,
                expected="no other writer",
                found="one at work",
                todo="Wait for it or choose another name",
            ) from None
        except FileNotFoundError:
            same = False
        if same:
            return lock
        os.close(lock)  # a lock on a file that is no longer in the folder holds nothing


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
