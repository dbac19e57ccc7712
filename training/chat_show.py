"""Samples of a chat set as a reader sees them: what is learnt stands in double brackets."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from .tokenizer import load_tokenizer
from .tokens import TokenFile


def shown(file: TokenFile, number: int, tokenizer: Path) -> str:
    """Sample ``number`` decoded, special tokens included, runs of learnt tokens as ``[[...]]``."""
    assert file.targets is not None
    loaded, begin, end = load_tokenizer(tokenizer), file.documents[number], file.documents[number + 1]
    pairs = zip(file.tokens[begin:end].tolist(), file.targets[begin:end].tolist(), strict=True)
    runs = [(learnt, [token for token, _ in run]) for learnt, run in groupby(pairs, key=lambda pair: pair[1])]
    return "".join(f"[[{loaded.decode(ids)}]]" if learnt else loaded.decode(ids) for learnt, ids in runs)
