"""Encode blocks of documents or conversations to ids, in several processes, in the order of the blocks."""

import functools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...parallel_state import BadInput, PeerFailed
from ..token_index import dtype_for
from .chat_formats import conversation_of
from .chat_template import Chat, ChatTemplate
from .text_and_jsonl import Block, documents_of, records_of
from .tokenizer_loading import Tokenizer, check_length, load_tokenizer

#: Bytes of input that take about as long as starting a process.
_WORTH_A_PROCESS = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Job:
    """State what a worker needs: the tokenizer's path, and how a document becomes tokens."""

    tokenizer: Path
    json_key: str
    append_eos: bool
    chat: Chat | None = None
    bos_id: int | None = None  # what a document begins with; a conversation's template writes its own


@dataclass(frozen=True, slots=True)
class Encoded:
    """Hold a block's ids end to end, and the number of ids of each document.

    For a chat set also: ``targets``, 1 for each id to be learnt; ``left_out``, the number of samples without
    such ids; ``unended``, the number of samples that learn an answer without its end mark.
    """

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    targets: NDArray[np.uint8] | None = None
    left_out: int = 0
    unended: int = 0


def useful_workers(size: int) -> int:
    """Return the number of cores, or fewer: a process must have more work than the time it takes to start."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 1 + size // _WORTH_A_PROCESS)


def encode_all(
    blocks: Iterable[tuple[int, Block]], job: Job, loaded: Tokenizer, workers: int
) -> Iterator[tuple[int, Encoded]]:
    """Yield the blocks' results in the order of the blocks; a few blocks a worker are in flight at a time."""
    if workers == 1:
        encode = _encoder(job, loaded)
        yield from ((done, encode(block)) for done, block in blocks)
        return
    # Forked from a server that has done the imports and nothing else, and not from this process, which has
    # threads (a progress display, the tokenizer's own). An executor, not a Pool: it raises when a worker is
    # killed, where a Pool would wait for ever.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    executor = ProcessPoolExecutor(workers, context, initializer=_begin_worker)
    pending: deque[tuple[int, Future[Encoded]]] = deque()
    try:
        for done, block in blocks:
            with _workers_alive():
                pending.append((done, executor.submit(_encode_in_worker, block, job)))
            if len(pending) > 3 * workers:
                yield _next(pending)
        while pending:
            yield _next(pending)
    finally:
        executor.shutdown(cancel_futures=True)


def _next(pending: deque[tuple[int, Future[Encoded]]]) -> tuple[int, Encoded]:
    done, future = pending.popleft()
    with _workers_alive():
        return done, future.result()


@contextmanager
def _workers_alive() -> Iterator[None]:
    """Raise ``PeerFailed`` if a worker was killed; while it starts, a kill shows as an end of file."""
    try:
        yield
    except (BrokenProcessPool, EOFError, ConnectionError) as error:
        raise PeerFailed(
            "a tokenizing process died, for want of memory perhaps: use fewer --workers"
        ) from error


def _encode_in_worker(block: Block, job: Job) -> Encoded:
    return _own_encoder(job)(block)


@functools.lru_cache(maxsize=1)
def _own_encoder(job: Job) -> Callable[[Block], Encoded]:
    """Return the encoder of this process, which loads its tokenizer once."""
    return _encoder(job, load_tokenizer(job.tokenizer))


def _encoder(job: Job, loaded: Tokenizer) -> Callable[[Block], Encoded]:
    if job.chat is None:
        return functools.partial(_encode, job=job, tokenizer=loaded)
    template = job.chat.template_of(loaded, job.tokenizer)
    return functools.partial(_encode_chat, template=template, dtype=dtype_for(loaded.vocab_size))


def _encode(block: Block, job: Job, tokenizer: Tokenizer) -> Encoded:
    parts, dtype = [], dtype_for(tokenizer.vocab_size)
    for where, text in documents_of(block, job.json_key):
        check_length(text, where)
        try:
            ids = tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise BadInput(
                where, expected="text", found=f"half a surrogate pair, {text[error.start]!r}"
            ) from error
        if job.append_eos and tokenizer.eos_id is not None:
            ids.append(tokenizer.eos_id)
        if ids:
            begin = [] if job.bos_id is None else [job.bos_id]
            parts.append(np.array([*begin, *ids], dtype=dtype))
    lengths = np.array([part.size for part in parts], dtype=np.int64)
    return Encoded(np.concatenate(parts) if parts else np.empty(0, dtype), lengths)


def _encode_chat(block: Block, template: ChatTemplate, dtype: str) -> Encoded:
    parts, targets, left_out, unended = [np.empty(0, dtype)], [np.empty(0, np.uint8)], 0, 0
    for where, record in records_of(block):
        ids, learnt = template.encode(conversation_of(record, where), where)
        if learnt[1:].any():  # the first token follows nothing, so nothing predicts it
            parts.append(np.array(ids, dtype=dtype))
            targets.append(learnt)
            unended += template.lacks_end(ids, learnt)
        else:
            left_out += 1
    lengths = np.array([part.size for part in parts[1:]], dtype=np.int64)
    return Encoded(np.concatenate(parts), lengths, np.concatenate(targets), left_out, unended)


def _begin_worker() -> None:
    """Let a worker ignore Ctrl-C, which the parent answers, and end when its parent ends.

    Ctrl-C reaches every process of the terminal. A worker whose parent was killed would wait for work for
    ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
