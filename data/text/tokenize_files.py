"""Tokenize text files into a token file, over several processes; the bytes do not depend on how many."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from ...parallel_state import BadInput, check_workers
from ...storage.output_places import check_place
from ..token_file import TokenFile
from ..token_writer import TokenWriter
from .chat_template import Chat
from .parquet_and_arrow import dataset_files
from .text_and_jsonl import Block, check_inputs, input_size, read_blocks
from .tokenize_workers import Job, encode_all, useful_workers
from .tokenizer_loading import Tokenizer, load_tokenizer


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
    on_progress: Callable[[int, int], None] | None = None,
) -> TokenFile:
    """Tokenize ``inputs``, in order, into the token file ``out``, which must not exist.

    ``.jsonl`` holds one object a line with the text in ``json_key``, ``.parquet`` and the folder of a Hugging
    Face data set have it as a column; any other file is UTF-8 text and one document, or with
    ``split_paragraphs`` one document for each paragraph between blank lines. ``.gz`` and ``.zst`` are
    unpacked on the way. Empty documents are left out. ``append_eos`` ends each document with the tokenizer's
    end of sequence; ``bos`` begins each with its begin of sequence (None: where the tokenizer's own files ask
    for it, as they then do for a prompt). ``workers`` is the number of processes (default: as many as there
    are cores and work for). With ``megatron``, ``<out>.idx`` lets Megatron read the same ``<out>.bin``.
    ``on_progress`` is called with (bytes of the inputs read, tokens written).

    With ``chat`` each record is a conversation (see ``chat_formats``), written out by the chat template, and
    only the assistant's tokens are to be learnt. Samples without any are left out; the index counts them.

    Killed or interrupted, the same call goes on where it was. ``BadInput`` names the file and line; nothing
    is left behind then. ``PeerFailed`` where a worker died.
    """
    if workers is not None:
        check_workers(workers, "tokenize")
    check_place(out, [*inputs, tokenizer])
    size = check_inputs(inputs, chat=chat is not None)
    loaded = load_tokenizer(tokenizer)
    template = None
    if chat is not None:
        chat = chat.on_one_day(loaded, tokenizer)
        template = chat.template_of(loaded, tokenizer)
    elif append_eos and loaded.eos_id is None:
        raise BadInput(
            tokenizer, "eos", expected="an end of sequence token", found="none", todo="Use --no-append-eos"
        )
    bos_id = _begin(loaded, tokenizer, bos, chat)
    job = Job(tokenizer, json_key, append_eos, chat, bos_id)
    workers = useful_workers(size) if workers is None else workers
    template_sha256 = None if template is None else template.sha256
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
        for done, encoded in encode_all(blocks, job, loaded, workers):
            writer.add_documents(encoded.ids, encoded.lengths, encoded.targets)
            writer.finished(encoded.left_out, encoded.unended)
            if on_progress is not None:
                on_progress(done, writer.tokens)
        if not writer.tokens and not writer.left_out:
            where = ", ".join(str(path) for path in inputs[:3]) + (", …" if len(inputs) > 3 else "")
            raise BadInput(where, "text", expected="at least one document", found="none")
        return writer.commit()


def _begin(loaded: Tokenizer, where: Path, bos: bool | None, chat: Chat | None) -> int | None:
    """Return the tokens that each document begins with."""
    if chat is not None:
        if bos is not None:
            option = "--bos" if bos else "--no-bos"
            expected = "neither --bos nor --no-bos: the template decides"
            raise BadInput("--chat", expected=expected, found=option)
        return None
    if bos and loaded.bos_id is None:
        expected = "a begin of sequence token"
        raise BadInput(where, "bos", expected=expected, found="none", todo="Use --no-bos")
    return loaded.bos_id if bos or (bos is None and loaded.starts_with_bos) else None


def _name(inputs: list[Path], loaded: Tokenizer, *options: object) -> str:
    """Return the name of a job: calls with the same name write the same bytes, with any number of workers.

    Nobody can put the time back at which a file's content or entry was changed, ``ctime``.
    """
    files = [file for path in inputs for file in (dataset_files(path) if path.is_dir() else [path])]
    stated = [(os.path.realpath(file), file.stat().st_size, file.stat().st_ctime_ns) for file in files]
    identity = [stated, loaded.fingerprint, loaded.vocab_size, loaded.eos_id, *options]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _blocks(inputs: list[Path], job: Job, split_paragraphs: bool) -> Iterator[tuple[int, Block]]:
    """Yield all blocks in order, each with how many bytes of the inputs have been read."""
    before, chat = 0, job.chat is not None
    for path in inputs:
        for block in read_blocks(path, split_paragraphs=split_paragraphs, json_key=job.json_key, chat=chat):
            yield before + block.position, block
        before += input_size(path)
