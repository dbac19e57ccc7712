"""Tokenize text files into a token file, over several processes; the bytes do not depend on how many.

Blocks of documents or conversations become ids in the order of the blocks.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...parallel_state import BadInput, PeerFailed
from ...storage.output_places import check_place
from ...system import check_workers
from ...system.machine import usable_cores
from ..token_file import TokenFile
from ..token_index import dtype_for
from ..token_writer import TokenWriter
from .chat_formats import conversation_of
from .chat_template import Chat, ChatTemplate
from .parquet_and_arrow import dataset_files
from .text_and_jsonl import Block, check_inputs, documents_of, input_size, read_blocks, records_of
from .tokenizer_loading import Tokenizer, check_text, load_tokenizer

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


def encode_all(
    blocks: Iterable[tuple[int, Block]], job: Job, loaded: Tokenizer, workers: int
) -> Iterator[tuple[int, Encoded]]:
    """Yield the blocks' results in the order of the blocks; a few blocks a worker are in flight at a time.

    Raises ``PeerFailed`` if a worker was killed.
    """
    if workers == 1:
        encode = _encoder(job, loaded)
        yield from ((bytes_read, encode(block)) for bytes_read, block in blocks)
        return
    # Forked from a server that has done the imports and nothing else, and not from this process, which has
    # threads (a progress display, the tokenizer's own). An executor, not a Pool: it raises when a worker is
    # killed, where a Pool would wait for ever.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    executor = ProcessPoolExecutor(workers, context, initializer=_begin_worker)
    pending: deque[tuple[int, Future[Encoded]]] = deque()
    try:
        for bytes_read, block in blocks:
            pending.append((bytes_read, executor.submit(_encode_in_worker, block, job)))
            if len(pending) > 3 * workers:
                before, future = pending.popleft()
                yield before, future.result()
        while pending:
            bytes_read, future = pending.popleft()
            yield bytes_read, future.result()
    except (BrokenProcessPool, EOFError, ConnectionError) as error:  # starting, it shows as an end of file
        why = "a tokenizing process died, for want of memory perhaps: use fewer --workers"
        raise PeerFailed(why) from error
    finally:
        executor.shutdown(cancel_futures=True)


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
        check_text(text, where)
        ids = tokenizer.encode(text)
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


def tokenize(
    inputs: list[Path],
    tokenizer: Path,
    out: Path,
    *,
    append_eos: bool = True,
    bos: bool | None = None,
    json_key: str = "text",
    split_paragraphs: bool = False,
    chat: Chat | None = None,
    workers: int | None = None,
    megatron: bool = False,
    on_progress: Callable[[int, int], None] = lambda read, written: None,
) -> TokenFile:
    """Tokenize ``inputs``, in order, into the token file ``out``, which must not exist.

    The options of ``trilith tokenize`` say what the keywords do. A file that is no ``.jsonl``, ``.parquet``
    or folder of a Hugging Face data set is UTF-8 text. Empty documents are left out. ``bos`` of ``None``: a
    begin of sequence where the tokenizer's own files ask for it, as they then do for a prompt. ``workers`` of
    ``None``: as many as there are cores and work for. ``on_progress`` is called with (bytes of the inputs
    read, tokens written).

    With ``chat`` (see ``chat_formats``) samples of which nothing is learnt are left out; the index counts
    them.

    Killed or interrupted, the same call goes on where it was. ``BadInput`` names the file and line; nothing
    is left behind then. ``PeerFailed`` where a worker died.
    """
    if workers is not None:
        check_workers(workers, "tokenize")
    check_place(out, [*inputs, tokenizer])
    size = check_inputs(inputs, chat=chat is not None)
    loaded = load_tokenizer(tokenizer)
    template_sha256 = None
    if chat is not None:
        chat = chat.on_one_day(loaded, tokenizer)
        template_sha256 = chat.template_of(loaded, tokenizer).sha256
        options = {
            "--bos": bos, "--no-bos": bos is False, "--no-append-eos": not append_eos,
            "--json-key": json_key != "text", "--split-paragraphs": split_paragraphs,
        }  # fmt: skip
        if idle := [option for option, is_written in options.items() if is_written]:
            expected = "no option of running text: the template decides"
            raise BadInput("tokenize", "--chat", expected=expected, found=idle[0])
    elif append_eos and loaded.eos_id is None:
        expected = "an end of sequence token"
        raise BadInput(tokenizer, "eos", expected=expected, found="none", todo="Use --no-append-eos")
    bos_id = None if chat is not None else _begin(loaded, tokenizer, bos)
    job = Job(tokenizer, json_key, append_eos, chat, bos_id)
    if workers is None:
        workers = min(usable_cores(), 1 + size // _WORTH_A_PROCESS)
    writer = TokenWriter(
        out,
        vocab_size=loaded.vocab_size,
        eos_id=loaded.eos_id,
        bos_id=bos_id,
        tokenizer_fingerprint=loaded.fingerprint,
        tokenizer=tokenizer if tokenizer.is_dir() else None,
        template_sha256=template_sha256,
        megatron=megatron,
        job=_name(inputs, loaded, bos_id, append_eos, json_key, split_paragraphs, template_sha256),
    )
    with writer:
        # Portions that an earlier call finished are read but not encoded, which takes little time.
        blocks = islice(_blocks(inputs, job, split_paragraphs), writer.portions, None)
        for bytes_read, encoded in encode_all(blocks, job, loaded, workers):
            writer.add_documents(encoded.ids, encoded.lengths, encoded.targets)
            writer.finished(encoded.left_out, encoded.unended)
            on_progress(bytes_read, writer.tokens)
        if not writer.tokens and not writer.left_out:
            where = ", ".join(str(path) for path in inputs[:3]) + (", …" if len(inputs) > 3 else "")
            raise BadInput(where, "text", expected="at least one document", found="none")
        return writer.commit()


def _begin(loaded: Tokenizer, where: Path, bos: bool | None) -> int | None:
    """Return the tokens that each document begins with."""
    if bos and loaded.bos_id is None:
        raise BadInput(where, "bos", expected="a begin of sequence token", found="none", todo="Use --no-bos")
    return loaded.bos_id if bos or (bos is None and loaded.starts_with_bos) else None


def _name(inputs: list[Path], loaded: Tokenizer, *options: object) -> str:
    """Return the name of a job: calls with the same name write the same bytes, with any number of workers.

    Nobody can put the time back at which a file's content or entry was changed, ``ctime``.
    """
    files = [file for path in inputs for file in (dataset_files(path) if path.is_dir() else [path])]
    states = [(os.path.realpath(file), file.stat().st_size, file.stat().st_ctime_ns) for file in files]
    identity = [states, loaded.fingerprint, loaded.vocab_size, loaded.eos_id, *options]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _blocks(inputs: list[Path], job: Job, split_paragraphs: bool) -> Iterator[tuple[int, Block]]:
    """Yield all blocks in order, each with how many bytes of the inputs have been read."""
    before, chat = 0, job.chat is not None
    for path in inputs:
        for block in read_blocks(path, split_paragraphs=split_paragraphs, json_key=job.json_key, chat=chat):
            yield before + block.position, block
        before += input_size(path)
