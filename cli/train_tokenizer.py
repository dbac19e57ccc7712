"""``trilith train-tokenizer INPUT... --vocab-size N --out FOLDER``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .say import say


def train_tokenizer(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help=".jsonl, .parquet, a folder of Hugging Face's datasets, or text; also .gz and .zst",
            metavar="INPUT...",
        ),
    ],
    vocab_size: Annotated[int, typer.Option(help="ids, 3 special and 256 byte tokens among them")],
    out: Annotated[Path, typer.Option(help="a new folder, for --tokenizer", metavar="FOLDER")],
    model_type: Annotated[Literal["bpe", "unigram"], typer.Option(help="SentencePiece's algorithm")] = "bpe",
    json_key: Annotated[
        str, typer.Option(help="where a line of JSON or a Parquet table has the text")
    ] = "text",
    chat_template: Annotated[
        Path | None, typer.Option(help="a Jinja file to carry in the folder, for conversations")
    ] = None,
) -> None:
    """Train a SentencePiece tokenizer on text, and write it so that AutoTokenizer gives the same ids.

    The text is held in memory: a sample of some hundred megabytes is plenty, and more than 2**30 characters
    are refused.
    """
    from ..data.text.documents import check_inputs, paragraphs_of
    from ..data.text.tokenizer_training import train_tokenizer as train
    from ..storage.output_file import check_place

    check_place(out, inputs)
    check_inputs(inputs)
    made = train(
        paragraphs_of(inputs, json_key),
        out,
        vocab_size=vocab_size,
        model_type=model_type,
        chat_template=chat_template,
    )
    say(f"{out}: {made.vocab_size:,} ids, {model_type}")
