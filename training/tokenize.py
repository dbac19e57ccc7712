"""Tokenize text files into a token file, over several processes; the bytes do not depend on how many."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..parallel_state import BadInput, PeerFailed
from .documents import Block, check_inputs, documents_of, read_blocks
from .token_index import dtype_for
from .token_writer import TokenWriter
from .tokenizer import Tokenizer, load_tokenizer
from .tokens import TokenFile

#: Bytes of input that take about as long as starting a process.
_WORTH_A_PROCESS = 8 * 2**20


@dataclass(frozen=True, slots=True)
class _Job:
    """What a worker must know: where the tokenizer is, and what becomes of a document."""

    tokenizer: Path
    json_key: str
    append_eos: bool


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A block's ids end to end, and how many each document has."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]


def tokenize(
    inputs: list[Path],
    tokenizer: Path,
    out: Path,
    *,
    append_eos: bool = True,
    json_key: str = "text",
    split_paragraphs: bool = False,
    workers: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> TokenFile:
    """Tokenize ``inputs``, in order, into the token file ``out``, which must not exist.

    ``.jsonl`` holds one object a line with the text in ``json_key``, ``.parquet`` has it as a column; any
    other file is UTF-8 text and one document, or with ``split_paragraphs`` one document for each paragraph
    between blank lines. ``.gz`` and ``.zst`` are unpacked on the way. Empty documents are left out.
    ``append_eos`` ends each document with the tokenizer's end of sequence. ``workers`` is the number of
    processes (default: as many as there are cores and work for). ``on_progress`` is called with (bytes of the
    inputs read, tokens written).

    ``BadInput`` names the file and line; nothing is left behind then. ``PeerFailed`` where a worker died.
    """
    size = check_inputs(inputs)
    loaded = load_tokenizer(tokenizer)
    if append_eos and loaded.eos_id is None:
        raise BadInput(
            tokenizer, "eos", expected="an end of sequence token", found="none", todo="Use --no-append-eos"
        )
    job = _Job(tokenizer, json_key, append_eos)
    workers = _useful_workers(size) if workers is None else workers
    if workers < 1:
        raise BadInput("tokenize", "workers", expected="at least 1", found=workers)
    writer = TokenWriter(
        out, vocab_size=loaded.vocab_size, eos_id=loaded.eos_id, tokenizer_fingerprint=loaded.fingerprint
    )
    tokens = 0
    with writer:
        for done, encoded in _encode_all(_blocks(inputs, job, split_paragraphs), job, loaded, workers):
            writer.add_documents(encoded.ids, encoded.lengths)
            tokens += encoded.ids.size
            if on_progress is not None:
                on_progress(done, tokens)
        return writer.commit()


def _useful_workers(size: int) -> int:
    """The cores at hand, but no process for less work than the seconds that it takes to start one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 1 + size // _WORTH_A_PROCESS)


def _blocks(inputs: list[Path], job: _Job, split_paragraphs: bool) -> Iterator[tuple[int, Block]]:
    """All blocks in order, each with how many bytes of the inputs have been read."""
    before = 0
    for path in inputs:
        for block in read_blocks(path, split_paragraphs=split_paragraphs, json_key=job.json_key):
            yield before + block.position, block
        before += path.stat().st_size


def _encode_all(
    blocks: Iterable[tuple[int, Block]], job: _Job, loaded: Tokenizer, workers: int
) -> Iterator[tuple[int, _Encoded]]:
    """The blocks' results in the order of the blocks, with a few blocks a worker on the way at any time."""
    if workers == 1:
        yield from ((done, _encode(block, job, loaded)) for done, block in blocks)
        return
    # Forked from a server that has done the imports and nothing else, and not from this process, which has
    # threads (a progress display, the tokenizer's own). An executor, not a Pool: it raises when a worker is
    # killed, where a Pool would wait for ever.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    executor = ProcessPoolExecutor(workers, context, initializer=_ignore_interrupt)
    pending: deque[tuple[int, Future[_Encoded]]] = deque()
    try:
        for done, block in blocks:
            pending.append((done, executor.submit(_encode_in_worker, block, job)))
            if len(pending) > 3 * workers:
                yield _next(pending)
        while pending:
            yield _next(pending)
    finally:
        executor.shutdown(cancel_futures=True)


def _next(pending: deque[tuple[int, Future[_Encoded]]]) -> tuple[int, _Encoded]:
    done, future = pending.popleft()
    try:
        return done, future.result()
    except BrokenProcessPool as error:
        raise PeerFailed(
            "a tokenizing process died, for want of memory perhaps: use fewer --workers"
        ) from error


def _encode_in_worker(block: Block, job: _Job) -> _Encoded:
    return _encode(block, job, _loaded(job.tokenizer))


@functools.cache
def _loaded(path: Path) -> Tokenizer:
    """One tokenizer a process."""
    return load_tokenizer(path)


def _encode(block: Block, job: _Job, tokenizer: Tokenizer) -> _Encoded:
    parts, dtype = [], dtype_for(tokenizer.vocab_size)
    for where, text in documents_of(block, job.json_key):
        try:
            ids = tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise BadInput(
                where, expected="text", found=f"half a surrogate pair, {text[error.start]!r}"
            ) from error
        if job.append_eos and tokenizer.eos_id is not None:
            ids.append(tokenizer.eos_id)
        if ids:
            parts.append(np.array(ids, dtype=dtype))
    lengths = np.array([part.size for part in parts], dtype=np.int64)
    return _Encoded(np.concatenate(parts) if parts else np.empty(0, dtype), lengths)


def _ignore_interrupt() -> None:
    """Ctrl-C reaches every process of the terminal; the parent alone answers it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
