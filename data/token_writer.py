"""Write a token file: stream documents in, commit by rename, one writer at a time."""

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike

from ..parallel_state import BadInput, require
from ..storage.disk import writing
from ..storage.small_files import Journal
from ..storage.staging import Staging
from ..system import counted
from .megatron import check_for_megatron, write_megatron_index
from .token_file import TokenFile, new_file, publish_tokens, refuse_taken, sync
from .token_index import TargetIndex, TokenPaths, dtype_for, little_endian
from .token_sums import FileHashes

#: Seconds between two notes of how far a job has come: what a kill costs at most.
MARK_EVERY = 2.0


@dataclass(frozen=True, slots=True)
class Mark:
    """Record how far a job has come, so that the next writer can continue after a kill.

    ``portions`` of the input were finished; ``left_out`` of their samples have nothing to learn, and
    ``unended`` learn no end mark. The files then had these ``sizes`` in bytes; bytes behind them are cut off.
    ``written`` has the hash of each file.
    """

    portions: int
    left_out: int
    unended: int
    sizes: Mapping[str, int]
    written: Mapping[str, str] = field(default_factory=dict)


class TokenWriter:
    """Build ``<name>.bin``, ``.docs.npy``, ``.sums`` and ``.json``, as a context, in a folder beside them.

    ``commit`` makes them durable and moves them into place, the index last. Without it, leaving the context
    leaves nothing. A second writer of the same name is refused while the first is alive, and afterwards
    because the name is taken. The next writer clears what a killed one left.

    With ``template_sha256``, the hash of a chat template, every document has targets, and ``<name>.targets``
    is written too. With ``megatron`` there is also ``<name>.idx``, with which Megatron reads the same
    ``<name>.bin``. ``job`` is any text that two jobs share only if they write the same. With it, a killed or
    interrupted writer leaves the portions reported to ``finished``, and the next writer of that job continues
    after them: ``portions`` is their number.
    """

    def __init__(
        self,
        name: str | Path,
        *,
        vocab_size: int,
        eos_id: int | None = None,
        bos_id: int | None = None,
        tokenizer_fingerprint: str = "",
        tokenizer: Path | None = None,
        template_sha256: str | None = None,
        megatron: bool = False,
        job: str = "",
    ) -> None:
        self._paths, self._vocab_size = TokenPaths.of(name), vocab_size
        # Unlike ``Path.resolve``, this raises nothing for a loop of links, which is refused where it is used.
        folder = os.path.realpath(self._paths.name.parent)
        #: What the index states.
        self._facts = {
            "dtype": dtype_for(vocab_size),
            "vocab_size": vocab_size,
            "eos_id": eos_id,
            "bos_id": bos_id,
            "tokenizer_fingerprint": tokenizer_fingerprint,
            "tokenizer": "" if tokenizer is None else os.path.relpath(os.path.realpath(tokenizer), folder),
        }
        self._template, self._job, self._megatron = template_sha256, job, megatron
        if megatron:
            check_for_megatron(vocab_size, chat=template_sha256 is not None)
        self._dtype = little_endian(dtype_for(vocab_size))
        self._names = ("tokens", "lengths", *(["targets"] if template_sha256 is not None else []))
        self._files: dict[str, BinaryIO] = {}
        self._last_mark = time.monotonic()
        self._nothing_yet()

    def __enter__(self) -> Self:
        parent = self._paths.name.parent
        if not parent.exists() and not parent.parent.is_dir():
            raise BadInput(parent, expected="a folder, or a place for one", found="nothing there")
        identity = hashlib.sha256(self._job.encode()).hexdigest()[:16] if self._job else None
        refuse = partial(refuse_taken, self._paths.name, self._paths.index, self._paths.all)
        self._staging = Staging.begin(self._paths.name, refuse, identity=identity)
        try:
            self._journal = Journal(self._staging.directory / "journal", Mark)
            self._open()
        except BaseException:
            self._staging.abandon()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # Bad input must be mended first, and then the job is another one.
        goes_on = self._job and kind is not None and not issubclass(kind, BadInput) and self._journal.records
        with ExitStack() as last:  # a full disk may refuse what a file still has to write when it is closed
            last.callback(self._staging.leave if goes_on else self._staging.abandon)
            for file in self._files.values():
                last.enter_context(writing(Path(file.name)))
                last.callback(file.close)

    def add(self, ids: ArrayLike) -> None:
        """Add one document of one or more ids."""
        ids = np.asarray(ids)
        self.add_documents(ids, np.array([ids.size]))

    def add_documents(self, ids: ArrayLike, lengths: ArrayLike, targets: ArrayLike | None = None) -> None:
        """Add documents end to end: their ids, each one's length (at least 1), which ids are to be learnt."""
        ids, lengths = np.asarray(ids), np.asarray(lengths, dtype="<i8")
        assert ids.ndim == lengths.ndim == 1 and ids.size == lengths.sum(), "lengths do not add up to the ids"
        assert lengths.size == 0 or lengths.min() > 0, "an empty document"
        assert (targets is None) == (self._template is None), "targets belong to chat sets, and to all of one"
        if not ids.size:
            return
        require(np.issubdtype(ids.dtype, np.integer), self._paths.tokens, "ids", "whole numbers", ids.dtype)
        for extreme in (ids.min(), ids.max()):
            fits = 0 <= extreme < self._vocab_size
            require(fits, self._paths.tokens, "id", f"0 to {self._vocab_size - 1}", extreme)
        self._write("tokens", np.ascontiguousarray(ids, dtype=self._dtype))
        self._write("lengths", np.ascontiguousarray(lengths))
        if targets is not None:
            marks = np.ascontiguousarray(targets, dtype=np.uint8)
            assert marks.shape == ids.shape and marks.max() <= 1, "a target for each id, 0 or 1"
            self._write("targets", marks)
            self._learnt += int(marks.sum())
        self.tokens += ids.size

    def finished(self, left_out: int = 0, unended: int = 0) -> None:
        """Note that one more portion of the input is written, so that it need not be repeated after a kill.

        ``left_out``: how many of its samples have nothing to learn. ``unended``: how many learn no end mark.
        """
        self.portions += 1
        self.left_out += left_out
        self.unended += unended
        if self._job and time.monotonic() - self._last_mark >= MARK_EVERY:
            for file in self._files.values():
                sync(file)
            sizes = {name: file.tell() for name, file in self._files.items()}
            self._journal.add(Mark(self.portions, self.left_out, self.unended, sizes, self._sha256()))
            self._last_mark = time.monotonic()

    def _begin_anew(self) -> None:
        """Forget what an earlier writer of the same job finished."""
        for file in self._files.values():
            file.close()
        self._journal.clear()
        self._nothing_yet()
        self._files = {name: (self._staging.directory / name).open("wb") for name in self._names}

    def commit(self) -> TokenFile:
        """Put the files in place and open them. ``BadInput`` where there is no token, or none to learn."""
        if not self.tokens and not self.left_out:
            raise BadInput(self._paths.tokens, "tokens", expected="at least one", found="none in the input")
        if self._template is not None and not self._learnt:
            expected = "at least one"
            todo = "No sample has an answer of the assistant's, or the chat template marks none"
            actual = f"none in {counted(self.left_out, 'sample')}"
            raise BadInput(self._paths.targets, "tokens to learn", expected=expected, found=actual, todo=todo)
        for open_file in self._files.values():
            sync(open_file)
        folder = self._staging.directory
        lengths = np.fromfile(folder / "lengths", dtype="<i8")
        offsets = np.zeros(lengths.size + 1, dtype="<i8")
        np.cumsum(lengths, out=offsets[1:])
        paths, places, targets = self._paths, {"tokens": self._paths.tokens}, None
        if self._template is not None:
            targets = TargetIndex(
                tokens=self._learnt,
                sha256=self._hashes["targets"].sha256.hexdigest(),
                template_sha256=self._template,
                left_out=self.left_out,
                unended=self.unended,
            )
            places["targets"] = paths.targets
        if self._megatron:
            with new_file(folder / "megatron") as file:
                write_megatron_index(file, offsets, self._dtype)
            places["megatron"] = paths.megatron
        hashes = [self._hashes[name] for name in self._names if name != "lengths"]
        return publish_tokens(self._staging, paths, offsets, hashes, places, targets=targets, **self._facts)

    def _open(self) -> None:
        """Open the files: empty, or with the data that an earlier writer of the same job finished."""
        self._last_mark = time.monotonic()
        mark = next((mark for mark in reversed(self._journal.records) if self._holds(mark)), None)
        if mark is None:
            self._begin_anew()
            return
        for name in self._names:
            path = self._staging.directory / name
            os.truncate(path, mark.sizes[name])
            self._files[name] = path.open("ab")
            for part in _parts(path):
                self._hashes[name].update(part)
                self._learnt += part.count(1) if name == "targets" else 0
        if mark.written != self._sha256():
            self._begin_anew()  # a file does not hold what was written
            return
        self.portions, self.left_out, self.unended = mark.portions, mark.left_out, mark.unended
        self.tokens = mark.sizes["tokens"] // self._dtype.itemsize

    def _holds(self, mark: Mark) -> bool:
        """Return whether the files are at least as long as the mark says."""
        paths = {name: self._staging.directory / name for name in self._names}
        return mark.sizes.keys() == paths.keys() and all(
            path.is_file() and path.stat().st_size >= mark.sizes[name] for name, path in paths.items()
        )

    def _nothing_yet(self) -> None:
        self._hashes = {name: FileHashes() for name in self._names}
        self._learnt: int = 0
        self.tokens = self.portions = self.left_out = self.unended = 0

    def _write(self, name: str, data: np.ndarray[Any, Any]) -> None:
        with writing(Path(self._files[name].name)):
            self._files[name].write(data.data)
        self._hashes[name].update(data.data)

    def _sha256(self) -> dict[str, str]:
        return {name: hashes.sha256.hexdigest() for name, hashes in self._hashes.items()}


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(2**22):
            yield part
