"""``trilith tokenize INPUT... --tokenizer DIR_OR_MODEL --out PREFIX``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def tokenize(
    inputs: Annotated[
        list[Path], typer.Argument(help=".jsonl, .parquet, or text; also .gz and .zst", metavar="INPUT...")
    ],
    tokenizer: Annotated[Path, typer.Option(help="a Hugging Face folder or a SentencePiece .model file")],
    out: Annotated[Path, typer.Option(help="name of the token file, without a suffix", metavar="PREFIX")],
    append_eos: Annotated[
        bool, typer.Option("--append-eos/--no-append-eos", help="end each document with the end token")
    ] = True,
    json_key: Annotated[
        str, typer.Option(help="where a line of JSON or a Parquet table has the text")
    ] = "text",
    split_paragraphs: Annotated[
        bool, typer.Option("--split-paragraphs", help="a document for each paragraph, not for each text file")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; default: the cores at hand")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress bar")] = False,
) -> None:
    """Turn text into the token file that a recipe's data.tokens names."""
    import time

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from ..training.documents import check_inputs
    from ..training.tokenize import tokenize as make_token_file

    console, began = Console(stderr=True), time.perf_counter()
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=quiet or not console.is_terminal
    ) as progress:
        task = progress.add_task("tokenizing", total=check_inputs(inputs), tokens=0)
        file = make_token_file(
            inputs,
            tokenizer,
            out,
            append_eos=append_eos,
            json_key=json_key,
            split_paragraphs=split_paragraphs,
            workers=workers,
            on_progress=lambda done, tokens: progress.update(task, completed=done, tokens=tokens),
        )
    seconds, count = time.perf_counter() - began, file.index.tokens
    typer.echo(
        f"{out}.bin: {count:,} tokens in {file.index.documents:,} documents, "
        f"{file.index.dtype}, {seconds:.1f} s, {count / seconds:,.0f} tokens/s"
    )
