"""``trilith tokenize INPUT... --tokenizer DIR_OR_MODEL --out PREFIX [--from megatron] [--to megatron]``."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..system import BadInput, counted, require
from .shared.options import INPUTS, JSON_KEY
from .shared.parameters import As, MaybeCount, Range, check_there, from_options, written
from .shared.say import byte_progress, say, token_progress

#: The parameters of ``trilith tokenize`` that mean something where nothing is tokenized.
_MEANT = {"inputs", "tokenizer", "out", "origin", "quiet"}


#: The programs whose token ids are read.
Origin = Literal["megatron", "datatrove"]


def index_files(
    context: typer.Context, inputs: list[Path], tokenizer: Path, out: Path, origin: Origin, *, quiet: bool
) -> None:
    """Write an index for each file of ``inputs``, and print the recipe's lines for more than one."""
    from ..data.foreign_tokens import (
        datatrove_files,
        index_tokens,
        indexed_before,
        outputs_of,
        read_datatrove,
    )
    from ..data.megatron import parse_blend, read_megatron
    from ..data.text.tokenizer_loading import load_tokenizer
    from ..recipes.recipe_text import to_toml

    if idle := [option for name, option in written(context).items() if name not in _MEANT]:
        expected = "no option that says how to tokenize: the tokens are there"
        raise BadInput("tokenize", "--from", expected=expected, found=idle[0])
    weights: list[float] | None = None
    if origin == "megatron":
        prefixes, weights = parse_blend([str(path) for path in inputs], "tokenize")
        files = [read_megatron(Path(prefix)) for prefix in prefixes]
    else:
        files = [read_datatrove(file) for path in inputs for file in datatrove_files(path)]
    loaded = load_tokenizer(tokenizer)
    names = [out] if len(files) == 1 else [out / foreign.path.stem for foreign in files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(
            "tokenize", "INPUT", expected="files with different names", found=f"two called {twice.name}",
            todo="Give each its own --out",
        )  # fmt: skip
    facts: dict[str, Any] = {
        "vocab_size": loaded.vocab_size, "eos_id": loaded.eos_id, "tokenizer_fingerprint": loaded.fingerprint,
    }  # fmt: skip
    lines = []
    with ExitStack() as unless_all:  # files that a later one's refusal takes away again
        for name, foreign in zip(names, files, strict=True):
            outputs = outputs_of(foreign, name)
            file = indexed_before(foreign, name, **facts) if len(files) > 1 else None
            if file is None:
                with byte_progress(str(name), 0 if quiet else foreign.size) as advance:
                    file = index_tokens(foreign, name, bos_id=loaded.bos_id, on_progress=advance, **facts)
                for path in reversed(outputs):
                    unless_all.callback(path.unlink, missing_ok=True)
            index = file.index
            start = "no start token" if index.bos_id is None else f"the start token, id {index.bos_id}"
            documents = counted(index.documents, "document")
            lines.append(
                f"{name}: {index.tokens:,} tokens in {documents}, {index.dtype}, which stay in "
                f"{foreign.path}; the documents have {start}"
            )
        unless_all.pop_all()
    for line in lines:
        say(line)
    if len(names) > 1:
        say(f"[data]\ntokens = {to_toml([str(name) for name in names])}")
        if weights is not None:
            say(f"weights = {to_toml(weights)}")


def tokenize(
    context: typer.Context,
    inputs: Annotated[list[Path], As("INPUT"), INPUTS],
    *,
    tokenizer: Annotated[Path, "Hugging Face folder or SentencePiece .model file"],
    out: Annotated[Path, As("PREFIX"), "path of the token file, without a suffix"],
    append_eos: Annotated[
        bool, As("--append-eos/--no-append-eos"), "end each document with the tokenizer's end token"
    ] = True,
    bos: Annotated[
        bool | None, As("--bos/--no-bos"), "begin documents with the start token; default: as the tokenizer"
    ] = None,
    json_key: Annotated[str, JSON_KEY] = "text",
    split_paragraphs: Annotated[bool, "make one document of each paragraph, not of each text file"] = False,
    chat: Annotated[bool, "read conversations; a model then learns only the assistant's tokens"] = False,
    chat_template: Annotated[Path | None, "Jinja chat template, for --chat; default: the tokenizer's"] = None,
    template_set: Annotated[
        list[str] | None, As("K=V"), "variable of the chat template, such as thinking=false; may be repeated"
    ] = None,
    show: Annotated[int, As("N"), Range(0), "samples to print, for --chat; learnt tokens are in [[ ]]"] = 0,
    workers: Annotated[MaybeCount, As("N"), "processes; default: one for each available core"] = None,
    origin: Annotated[
        Origin | None,
        As("--from", "NAME"),
        "megatron or datatrove: INPUT holds its ids, a prefix of .bin and .idx or a .ds file; not copied",
    ] = None,
    target: Annotated[
        Literal["megatron"] | None, As("--to", "NAME"), "megatron: write .idx too, so that Megatron reads it"
    ] = None,
    quiet: Annotated[bool, "show no progress bar"] = False,
) -> None:
    """Turn text or conversations into a token file for training.

    The key data.tokens of a recipe names the token file. With --chat each record is a conversation; it has
    messages, or conversations (from, value), or prompt and completion, or instruction, input and output. If
    the command is killed or interrupted, the same command continues.

    With --from nothing is tokenized: the command reads the ids once and writes an index, and PREFIX.bin is a
    link to their file. Several inputs, which may have weights as in Megatron's --data-path, or a folder of
    .ds files become as many token files, in the folder PREFIX.

    Examples:

        trilith tokenize corpus.txt --tokenizer tokenizer --out tokens --split-paragraphs
        trilith tokenize chat.jsonl --tokenizer tokenizer --out sft --chat --show 1
        trilith tokenize data/wiki_text_document --tokenizer tokenizer --out wiki --from megatron
    """
    options = locals()
    if origin is None:  # else a prefix of files, or a weight
        for path in inputs:
            check_there(path, INPUTS)
    check_there(tokenizer, "a Hugging Face folder or a SentencePiece .model file")
    if origin is not None:
        index_files(context, inputs, tokenizer, out, origin, quiet=quiet)
        return
    import time

    from ..data.text.chat_template import Chat, shown, warnings_of
    from ..data.text.text_and_jsonl import check_inputs
    from ..data.text.tokenize_files import tokenize as make_token_file
    from ..data.text.tokenizer_loading import load_tokenizer

    how = Chat.of(chat_template, template_set or []) if chat or chat_template or template_set else None
    require(how is not None or not show, "tokenize", "--show", "--chat with it", show)
    began = time.perf_counter()
    with token_progress(check_inputs(inputs, chat=how is not None), quiet=quiet) as on_progress:
        work = {"chat": how, "megatron": target is not None, "on_progress": on_progress}
        file = from_options(make_token_file, options, **work)
    seconds, count = time.perf_counter() - began, file.index.tokens
    say(
        f"{out}.bin: {count:,} tokens in {counted(file.index.documents, 'document')}, "
        f"{file.index.dtype}, {seconds:.1f} s, {count / seconds:,.0f} tokens/s"
    )
    if how is None:
        start = file.index.bos_id
        beginning = "without a start token" if start is None else f"with the start token, id {start}"
        say(f"each document begins {beginning}")
    if (targets := file.index.targets) is not None:
        say(
            f"{out}.targets: {targets.tokens:,} tokens to learn, {targets.tokens / count:.0%}; "
            f"{counted(targets.left_out, 'sample')} left out: nothing of the assistant's in them"
        )
        loaded = load_tokenizer(tokenizer)
        for warning in warnings_of(file, how, loaded, tokenizer) if how is not None else []:
            say(f"warning: {warning}", err=True)
        for number in range(min(show, file.index.documents)):
            say(f"--- sample {number + 1}\n{shown(file, number, loaded)}")
