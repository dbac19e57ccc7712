"""Write small token files, and what they are made of; read back what is in them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from trilith.data import Batch, TokenFile
from trilith.data.batches import GlobalBatches
from trilith.data.sample_order import piece_of
from trilith.data.text.tokenize_files import tokenize
from trilith.data.token_index import TokenIndex
from trilith.data.token_writer import TokenWriter

#: A template of chats in which every turn ends with a special token, and one that marks what is learnt.
CHATML, MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}" + turn + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    for turn in (
        "{{ m.content + '<|im_end|>\n' }}",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}",
    )
)
#: The same with the tokens that any trained tokenizer has.
TURNS = (
    "{% for m in messages %}{{ bos_token + m.role + '\n' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)


def zstd(data: bytes) -> bytes:
    """Compress as the zstd program does, to one frame."""
    return bytes(pyarrow.Codec("zstd").compress(data, asbytes=True))


def batch_at(batches: GlobalBatches, step: int, index: int = 0, size: int = 1) -> Batch:
    """Return what data rank ``index`` of ``size`` gets at a step."""
    return batches.rows(step, piece_of(batches.global_batch, index, size))


def write_token_file(
    name: Path, documents: Iterable[Any], targets: Iterable[Any] | None = None, **stated: Any
) -> TokenFile:
    """Write documents of ids; ``targets`` tell for each which ids are to be learnt, as a chat set does."""
    options = {"vocab_size": 1000, "template_sha256": None if targets is None else "0" * 64} | stated
    with TokenWriter(name, **options) as writer:
        if targets is None:
            for ids in documents:
                writer.add(ids)
        else:
            for ids, learnt in zip(documents, targets, strict=True):
                writer.add_documents(ids, [len(ids)], learnt)
        return writer.commit()


def documents_of(file: TokenFile) -> list[list[int]]:
    """Return the ids of each document."""
    bounds = zip(file.documents[:-1], file.documents[1:], strict=True)
    return [file.tokens[start:stop].tolist() for start, stop in bounds]


def bytes_of(name: Path) -> dict[str, bytes]:
    """Return the bytes of each file of a token file, by its ending; nothing unfinished lies beside them."""
    files = {path.name.removeprefix(name.name): path for path in name.parent.glob(f"{name.name}.*")}
    return {ending: path.read_bytes() for ending, path in sorted(files.items())}


def change_index(folder: Path, **changes: Any) -> None:
    """Change the index of ``folder/data`` as somebody would who also knows the seal."""
    path = folder / "data.json"
    content = json.loads(path.read_text()) | changes
    with contextlib.suppress(ValueError):
        content["seal"] = TokenIndex.model_validate(content).sealed().seal
    path.write_text(json.dumps(content))


def write_json_lines(path: Path, records: Iterable[object]) -> Path:
    """Write each record as a line of JSON."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_dataset(folder: Path, records: list[Any]) -> Path:
    """Write two files as ``Dataset.save_to_disk`` does: Arrow streams, and their names in state.json."""
    folder.mkdir(parents=True)
    half = -(-len(records) // 2)
    names = [f"data-{number:05d}-of-00002.arrow" for number in range(2)]
    for name, part in zip(names, (records[:half], records[half:]), strict=True):
        table = pyarrow.Table.from_pylist(part)
        with (folder / name).open("wb") as file, pyarrow.ipc.new_stream(file, table.schema) as out:
            out.write_table(table, max_chunksize=7)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def stop_tokenizing(
    inputs: Sequence[Path], tokenizer: Path, out: Path, after: int = 1, **options: Any
) -> None:
    """Tokenize, and stop when so many portions have been written; see that their journal is left."""
    reports = iter(range(1, after + 1))

    def stop(done: int, tokens: int) -> None:
        if next(reports) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize([*inputs], tokenizer, out, workers=1, on_progress=stop, **options)
    assert [*out.parent.glob(f"{out.name}.tmp-*/journal")]
