"""Write a token file: stream documents in, commit by rename, one writer at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from ..parallel_state import BadInput
from ..storage.token_lock import take
from .token_index import VERSION, TargetIndex, TokenIndex, TokenPaths, dtype_for, little_endian, probe
from .token_journal import Journal, Mark
from .token_sums import BlockSums
from .tokens import TokenFile

#: Seconds between two notes of how far a job has come: what a kill costs at most.
MARK_EVERY = 2.0


class TokenWriter:
    """A context that builds ``<name>.bin``, ``.docs.npy``, ``.sums`` and ``.json`` in ``<name>.partial/``.

    ``commit`` makes them durable and moves them into place, the index last. Leaving without it leaves
    nothing. A second writer of the same name is refused while the first is alive, and after it because the
    name is taken. What a killed writer left is cleared by the next one.

    With ``template_sha256``, the hash of a chat template, every document has targets, and ``<name>.targets``
    is written too. With a ``job``, any text that two jobs share only where they write the same, a writer that
    was killed or interrupted leaves what ``finished`` was told, and the next of the same job goes on behind
    it: ``portions`` says how much that is, and ``read`` what was read. Where the input is another by now,
    ``begin_anew``.
    """

    def __init__(
        self,
        name: str | Path,
        *,
        vocab_size: int,
        eos_id: int | None = None,
        bos_id: int | None = None,
        tokenizer_fingerprint: str = "",
        template_sha256: str | None = None,
        job: str = "",
    ) -> None:
        self._paths = TokenPaths.of(name)
        self._partial = self._paths.name.with_name(self._paths.name.name + ".partial")
        self._vocab_size, self._fingerprint = vocab_size, tokenizer_fingerprint
        self._eos_id, self._bos_id = eos_id, bos_id
        self._template, self._job = template_sha256, job
        if not 1 <= vocab_size <= 2**32:
            raise BadInput(self._paths.index, "vocab_size", expected="1 to 2**32", found=vocab_size)
        self._dtype = little_endian(dtype_for(vocab_size))
        self._names = ("tokens", "lengths", *(["targets"] if template_sha256 is not None else []))
        self._files: dict[str, BinaryIO] = {}
        self._nothing_yet()

    def __enter__(self) -> TokenWriter:
        try:
            self._refuse_taken_name()
        except BadInput:
            self._remove_leftovers()
            raise
        parent = self._partial.parent
        if not parent.exists() and not parent.parent.is_dir():
            raise BadInput(parent, expected="a folder, or a place for one", found="nothing there")
        self._made_parent = not parent.exists()
        parent.mkdir(exist_ok=True)
        self._lock = take(self._partial)
        self._journal = Journal(self._partial / "journal", self._job, every=MARK_EVERY)
        try:
            # Asked again: another writer may have finished between the first look and the lock.
            self._refuse_taken_name(held=True)
            self._open()
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
        for file in self._files.values():
            file.close()
        self._journal.close()
        # Bad input must be mended first, and then the job is another one.
        if self._job and kind is not None and not issubclass(kind, BadInput) and self._journal.marked:
            os.close(self._lock)
        else:
            self._clear()

    def add(self, ids: ArrayLike) -> None:
        """One document, one or more ids."""
        ids = np.asarray(ids)
        self.add_documents(ids, np.array([ids.size]))

    def add_documents(self, ids: ArrayLike, lengths: ArrayLike, targets: ArrayLike | None = None) -> None:
        """Several documents end to end, how many ids each has (at least one), and which are to be learnt."""
        ids, lengths = np.asarray(ids), np.asarray(lengths, dtype="<i8")
        assert ids.ndim == lengths.ndim == 1 and ids.size == lengths.sum(), "lengths do not add up to the ids"
        assert lengths.size == 0 or lengths.min() > 0, "an empty document"
        assert (targets is None) == (self._template is None), "targets belong to chat sets, and to all of one"
        if not ids.size:
            return
        if not np.issubdtype(ids.dtype, np.integer):
            raise BadInput(self._paths.tokens, "ids", expected="whole numbers", found=ids.dtype)
        for extreme in (ids.min(), ids.max()):
            if not 0 <= extreme < self._vocab_size:
                raise BadInput(
                    self._paths.tokens, "id", expected=f"0 to {self._vocab_size - 1}", found=extreme
                )
        self._write("tokens", np.ascontiguousarray(ids, dtype=self._dtype))
        self._write("lengths", np.ascontiguousarray(lengths))
        if targets is not None:
            marks = np.ascontiguousarray(targets, dtype=np.uint8)
            assert marks.shape == ids.shape and marks.max() <= 1, "a target for each id, 0 or 1"
            self._write("targets", marks)
            self._learnt += int(marks.sum())
        self.tokens += ids.size

    def finished(self, left_out: int = 0, unended: int = 0, *, read: str = "") -> None:
        """One more portion of the input is in; after a kill it need not come again.

        ``left_out``: how many of its samples have nothing to learn. ``unended``: how many learn no end mark.
        ``read``: a hash of all portions up to here.
        """
        self.portions += 1
        self.left_out += left_out
        self.unended += unended
        if self._job and self._journal.due:
            sizes = {name: file.tell() for name, file in self._files.items()}
            written = {name: digest.hexdigest() for name, digest in self._digests.items()}
            mark = Mark(self.portions, self.left_out, self.unended, sizes, read, written)
            self._journal.mark(mark, self._files)

    def begin_anew(self) -> None:
        """Forget what an earlier writer of the same job finished."""
        for file in self._files.values():
            file.close()
        if self._job:
            self._journal.forget()
        self._nothing_yet()
        self._files = {name: (self._partial / name).open("wb") for name in self._names}

    def commit(self) -> TokenFile:
        """Put the files in place and open them. ``BadInput`` where there is no token, or none to learn."""
        if not self.tokens and not self.left_out:
            raise BadInput(self._paths.tokens, "tokens", expected="at least one", found="none in the input")
        if self._template is not None and not self._learnt:
            raise BadInput(
                self._paths.targets,
                "tokens to learn",
                expected="at least one",
                found=f"none in {self.left_out} samples",
            )
        for name, open_file in self._files.items():
            open_file.flush()
            if name != "lengths":
                _sync(open_file)
        lengths = np.fromfile(self._partial / "lengths", dtype="<i8")
        offsets = np.zeros(lengths.size + 1, dtype="<i8")
        np.cumsum(lengths, out=offsets[1:])
        with (self._partial / "documents").open("wb+") as file:
            np.save(file, offsets, allow_pickle=False)
            _sync(file)
            file.seek(0)
            documents_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        sums = b"".join(self._sums[name].value().tobytes() for name in self._names if name != "lengths")
        with (self._partial / "sums").open("wb") as file:
            file.write(sums)
            _sync(file)
        targets = None
        if self._template is not None:
            targets = TargetIndex(
                tokens=self._learnt,
                sha256=self._digests["targets"].hexdigest(),
                probe=probe(self._partial / "targets"),
                template_sha256=self._template,
                left_out=self.left_out,
                unended=self.unended,
            )
        index = TokenIndex(
            version=VERSION,
            dtype=dtype_for(self._vocab_size),
            tokens=self.tokens,
            documents=lengths.size,
            vocab_size=self._vocab_size,
            eos_id=self._eos_id,
            bos_id=self._bos_id,
            tokenizer_fingerprint=self._fingerprint,
            sha256=self._digests["tokens"].hexdigest(),
            probe=probe(self._partial / "tokens"),
            documents_sha256=documents_sha256,
            targets=targets,
            sums_sha256=hashlib.sha256(sums).hexdigest(),
        ).sealed()
        with (self._partial / "index").open("wb") as file:
            file.write(json.dumps(index.model_dump(exclude_defaults=True), indent=2).encode() + b"\n")
            _sync(file)
        (self._partial / "tokens").rename(self._paths.tokens)
        (self._partial / "documents").rename(self._paths.documents)
        (self._partial / "sums").rename(self._paths.sums)
        if targets is not None:
            (self._partial / "targets").rename(self._paths.targets)
        _sync_folder(self._partial.parent)
        (self._partial / "index").rename(self._paths.index)
        _sync_folder(self._partial.parent)
        return TokenFile.open(self._paths.name)

    def _open(self) -> None:
        """The files, empty, or with what an earlier writer of the same job finished."""
        mark = self._journal.begin() if self._job else None
        if mark is None or {*mark.sizes} != {*self._names}:
            self.begin_anew()
            return
        for name in self._names:
            path = self._partial / name
            os.truncate(path, mark.sizes[name])
            self._files[name] = path.open("ab")
            for part in _parts(path):
                self._digests[name].update(part)
                self._sums[name].update(part)
                self._learnt += sum(part) if name == "targets" else 0
        if mark.written != {name: digest.hexdigest() for name, digest in self._digests.items()}:
            self.begin_anew()  # a file does not hold what was written
            return
        self.portions, self.left_out, self.unended = mark.portions, mark.left_out, mark.unended
        self.read, self.tokens = mark.read, mark.sizes["tokens"] // self._dtype.itemsize

    def _nothing_yet(self) -> None:
        self._digests = {name: hashlib.sha256() for name in self._names}
        self._sums = {name: BlockSums() for name in self._names}
        self._learnt: int = 0
        self.tokens = self.portions = self.left_out = self.unended = 0
        self.read = ""

    def _write(self, name: str, data: np.ndarray[Any, Any]) -> None:
        self._files[name].write(data.data)
        self._digests[name].update(data.data)
        self._sums[name].update(data.data)

    def _refuse_taken_name(self, *, held: bool = False) -> None:
        """An index says that the name is taken. With no ``.partial`` beside them, so do the other files."""
        ours = held or self._partial.exists()
        for path in self._paths.all[: 1 if ours else None]:
            if path.exists() or path.is_symlink():
                raise BadInput(
                    path, expected="a new name", found="an existing file", todo="Remove it or choose another"
                )

    def _remove_leftovers(self) -> None:
        """Remove what a killed writer of this name left after its files were in place."""
        if self._partial.is_dir() and self._paths.index.exists():
            with contextlib.suppress(BadInput):  # another writer is at work, and removes them itself
                self._lock = take(self._partial)
                self._made_parent = False
                self._clear()

    def _clear(self) -> None:
        """Remove what a writer makes, the lock last, and nothing that somebody else put there."""
        for name in ("tokens", "lengths", "targets", "documents", "sums", "index", "journal", "lock"):
            (self._partial / name).unlink(missing_ok=True)
        os.close(self._lock)
        with contextlib.suppress(OSError):  # not empty: another writer has just begun, or a stranger's file
            self._partial.rmdir()
            if self._made_parent:
                self._partial.parent.rmdir()


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(2**22):
            yield part


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
