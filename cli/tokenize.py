"""``trilith tokenize INPUT... --tokenizer DIR_OR_MODEL --out PREFIX``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .say import say


def tokenize(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help=".jsonl, .parquet, a folder of Hugging Face's datasets, or text; also .gz and .zst",
            metavar="INPUT...",
        ),
    ],
    tokenizer: Annotated[Path, typer.Option(help="a Hugging Face folder or a SentencePiece .model file")],
    out: Annotated[Path, typer.Option(help="name of the token file, without a suffix", metavar="PREFIX")],
    append_eos: Annotated[
        bool, typer.Option("--append-eos/--no-append-eos", help="end each document with the end token")
    ] = True,
    bos: Annotated[
        bool | None,
        typer.Option(
            "--bos/--no-bos",
            help="begin each document with the start token; default: where the tokenizer does so to a text",
        ),
    ] = None,
    json_key: Annotated[
        str, typer.Option(help="where a line of JSON or a Parquet table has the text")
    ] = "text",
    split_paragraphs: Annotated[
        bool, typer.Option("--split-paragraphs", help="a document for each paragraph, not for each text file")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="conversations: only the assistant's tokens are learnt")
    ] = False,
    chat_template: Annotated[
        Path | None, typer.Option(help="with --chat: a Jinja file; default: the tokenizer's own template")
    ] = None,
    template_set: Annotated[
        list[str] | None,
        typer.Option(help="with --chat: a variable of the template, such as enable_thinking=false"),
    ] = None,
    show: Annotated[
        int, typer.Option(min=0, help="with --chat: print so many samples, what is learnt in [[ ]]")
    ] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; default: the cores at hand")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress bar")] = False,
) -> None:
    """Turn text, or with --chat conversations, into the token file that a recipe's data.tokens names.

    A conversation is a record with messages; conversations (from, value); prompt and completion; or
    instruction, input and output. Killed or interrupted, the same command goes on where it was.
    """
    import time

    from ..data.text.chat_show import shown, warnings_of
    from ..data.text.chat_template import Chat
    from ..data.text.documents import check_inputs
    from ..data.text.tokenize import tokenize as make_token_file
    from ..parallel_state import BadInput
    from .progress import token_progress

    if show and not (chat or chat_template or template_set):
        raise BadInput("tokenize", "--show", expected="--chat with it", found=show)
    how = Chat.of(chat_template, template_set or []) if chat or chat_template or template_set else None
    began = time.perf_counter()
    with token_progress(check_inputs(inputs, chat=how is not None), quiet=quiet) as on_progress:
        file = make_token_file(
            inputs,
            tokenizer,
            out,
            append_eos=append_eos,
            bos=bos,
            json_key=json_key,
            split_paragraphs=split_paragraphs,
            chat=how,
            workers=workers,
            on_progress=on_progress,
        )
    seconds, count = time.perf_counter() - began, file.index.tokens
    say(
        f"{out}.bin: {count:,} tokens in {file.index.documents:,} documents, "
        f"{file.index.dtype}, {seconds:.1f} s, {count / seconds:,.0f} tokens/s"
    )
    if how is None:
        start = file.index.bos_id
        said = "no start token" if start is None else f"the start token, id {start}"
        say(f"each document begins with {said}")
    if (targets := file.index.targets) is not None:
        say(
            f"{out}.targets: {targets.tokens:,} tokens to learn, {targets.tokens / count:.0%}; "
            f"{targets.left_out:,} samples left out: nothing of the assistant's in them"
        )
        for warning in warnings_of(file, how, tokenizer) if how is not None else []:
            say(f"warning: {warning}", err=True)
        for number in range(min(show, file.index.documents)):
            say(f"--- sample {number + 1}\n{shown(file, number, tokenizer)}")
