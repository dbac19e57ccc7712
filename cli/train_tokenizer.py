"""``trilith train-tokenizer INPUT... --vocab-size N --out FOLDER``."""

from pathlib import Path
from typing import Annotated

from .shared.options import INPUTS, JSON_KEY
from .shared.parameters import As, There
from .shared.say import say


def train_tokenizer(
    inputs: Annotated[list[Path], There, As("INPUT"), INPUTS],
    *,
    vocab_size: Annotated[int, "number of token ids, including 3 special tokens and 256 byte tokens"],
    out: Annotated[Path, As("FOLDER"), "new folder for the tokenizer"],
    json_key: Annotated[str, JSON_KEY] = "text",
    chat_template: Annotated[
        Path | None,
        "Jinja file with the chat template to store in the folder; text that spells a special token, such "
        "as </s>, is then read as that token, as by most tokenizers",
    ] = None,
) -> None:
    """Train a SentencePiece tokenizer (BPE) that transformers can read.

    SentencePiece and transformers' AutoTokenizer give the same ids. The text is held in memory: some hundred
    megabytes are enough, and more than 2**30 characters are refused.

    Examples:

        trilith train-tokenizer corpus.txt --vocab-size 32000 --out tokenizer
        trilith train-tokenizer part-*.jsonl --json-key content --vocab-size 32000 --out tokenizer
    """
    from ..data.text.text_and_jsonl import check_inputs, paragraphs_of
    from ..data.text.tokenizer_training import train_tokenizer as train
    from ..storage.output_places import check_place

    check_place(out, inputs)
    check_inputs(inputs)
    texts = paragraphs_of(inputs, json_key)
    tokenizer = train(texts, out, vocab_size=vocab_size, chat_template=chat_template)
    say(f"{out}: {tokenizer.vocab_size:,} ids")
