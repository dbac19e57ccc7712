"""What transformers needs of an exported folder, besides the weights, to generate as trilith does."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from ...parallel_state import BadInput
from ...storage.files_beside_weights import (
    CHAT_TEMPLATES,
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    Companion,
)
from ...storage.strict_json import parse_object

_VOCABULARY = "tokenizer.json"


class _Token(BaseModel):
    content: str
    id: int = Field(default=0, ge=0)


class _Tokenizer(BaseModel):
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    split_special_tokens: bool = False
    chat_template: Any = None


class _Vocabulary(BaseModel):
    added_tokens: list[_Token] = []


def for_transformers(
    config: dict[str, Any], companions: list[Companion]
) -> tuple[dict[str, Any], list[Companion]]:
    """Return the config and the companions of an exported folder, made from those of a checkpoint.

    ``bos_token_id`` and ``eos_token_id`` that the config lacks are the tokenizer's, and
    ``generation_config.json`` states them too: transformers looks nowhere else for where a text ends. A
    tokenizer with a chat template does not split special tokens, which transformers would do in what the
    template writes as well. Files that cannot be read stay as they are.
    """
    files = {companion.name: companion for companion in companions}
    try:
        tokenizer = _Tokenizer.model_validate(_content(files, TOKENIZER_CONFIG))
        if ids := _missing_ids(tokenizer, files, config):
            _put(files, GENERATION_CONFIG, ids)
        templated = tokenizer.chat_template or any(name in files for name in CHAT_TEMPLATES)
        if templated and tokenizer.split_special_tokens:
            _put(files, TOKENIZER_CONFIG, {"split_special_tokens": False})
    except (BadInput, ValidationError):
        return config, companions
    return config | ids, [*files.values()]


def _missing_ids(
    tokenizer: _Tokenizer, files: Mapping[str, Companion], config: Mapping[str, Any]
) -> dict[str, int]:
    """Return the ids of a text's first and last token, as far as the config has none."""
    tokens = {"bos_token_id": tokenizer.bos_token, "eos_token_id": tokenizer.eos_token}
    contents = {
        key: token.content if isinstance(token, _Token) else token
        for key, token in tokens.items()
        if token is not None and config.get(key) is None
    }
    if not contents:
        return {}
    vocabulary = _Vocabulary.model_validate(_content(files, _VOCABULARY))
    rows = config.get("vocab_size", 0)  # a freshly made model may have no row for an id
    ids = {token.content: token.id for token in vocabulary.added_tokens if token.id < rows}
    return {key: ids[content] for key, content in contents.items() if content in ids}


def _content(files: Mapping[str, Companion], name: str) -> dict[str, object]:
    return parse_object(files[name].data, name) if name in files else {}


def _put(files: dict[str, Companion], name: str, changes: Mapping[str, object]) -> None:
    """Change these keys of a file of JSON; make the file if there is none."""
    text = json.dumps({**_content(files, name), **changes}, indent=2, ensure_ascii=False) + "\n"
    files[name] = Companion(name, text.encode())
