"""Compare tokenizers by what decides their ids, where the bytes of their files differ."""

from pathlib import Path
from typing import Any

from ...parallel_state import BadInput
from ...storage.small_files import read_json
from .tokenizer_loading import LARGEST_FILE

#: The file that decides alone where it is: transformers makes it of the others, and reads it first.
_DECIDES = "tokenizer.json"


def give_the_same_ids(folder: Path, other: Path) -> bool:
    """Tell whether two Hugging Face folders surely give the same ids: their vocabulary, merges, added tokens,
    normalizer and pre-tokenizer are equal. A tokenizer that was loaded and saved again has other bytes, other
    files beside ``tokenizer.json``, and other special tokens around a text, which decide no ids of it.
    """
    try:
        return _decisive(folder) == _decisive(other)
    except (BadInput, KeyError, TypeError, ValueError):  # without the file, or of an unknown form
        return False


def _decisive(folder: Path) -> dict[str, Any]:
    tokenizer = read_json(folder / _DECIDES, LARGEST_FILE)
    model = {key: value for key, value in tokenizer["model"].items() if not _is_default(value)}
    if "merges" in model:  # older files have "a b", newer ones ["a", "b"]
        model["merges"] = [
            merge.split(" ") if isinstance(merge, str) else list(merge) for merge in model["merges"]
        ]
    parts = {name: tokenizer.get(name) for name in ("normalizer", "pre_tokenizer")}
    added = {token["content"]: token for token in tokenizer.get("added_tokens") or []}
    if (folder / "added_tokens.json").exists():
        for content, number in read_json(folder / "added_tokens.json").items():
            added.setdefault(content, {"id": number})
    return {"model": model, "added": added, **parts}


def _is_default(value: object) -> bool:
    """Tell whether some versions of the ``tokenizers`` library leave this value out."""
    return value is None or value is False or value == ""
