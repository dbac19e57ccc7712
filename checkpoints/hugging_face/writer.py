"""Write a Hugging Face folder: shards as transformers cuts them, and what generation needs besides."""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from ...parallel_state import BadInput
from ...storage.disk import Disk
from ...storage.dtypes import BITS
from ...storage.file_names import ADAPTER_CONFIG, CONFIG, INDEX
from ...storage.files_beside_weights import CHAT_TEMPLATES, GENERATION_CONFIG, TOKENIZER_CONFIG, Companion
from ...storage.safetensors_writer import TensorWriter
from ...storage.strict_json import parse_object

_VOCABULARY = "tokenizer.json"
Spec = tuple[str, tuple[int, ...]]  # dtype by the format's name, and shape

#: transformers' own default until it was raised; hubs and tools handle files of this size well.
MAX_SHARD_SIZE = 5 * 10**9


def plan_shards(tensors: Mapping[str, Spec], max_shard_size: int = MAX_SHARD_SIZE) -> dict[str, list[str]]:
    """Return file name -> the tensors in it, in order, as huggingface_hub cuts them."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda spec: prod(spec[1]) * BITS[spec[0]] // 8,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    return split.filename_to_tensors


def open_file(path: Path, tensors: Mapping[str, Spec], *, again: bool = False) -> TensorWriter:
    """Return what writes a file of weights as transformers does; ``again``: as for ``TensorWriter``."""
    spec = {name: tensors[name] for name in sorted(tensors, key=lambda n: (-BITS[tensors[n][0]], n))}
    return TensorWriter(path, spec, metadata={"format": "pt"}, again=again)


def write_config_and_index(
    directory: Path, config: Mapping[str, object], files: Sequence[TensorWriter], *, adapters: bool = False
) -> None:
    """Write what belongs to closed files of weights, the index last; with ``adapters``, PEFT's.

    A folder of Hugging Face's does not say whose code computed its model.
    """
    neutral = {key: value for key, value in config.items() if key != "implementation"}
    _write_json(directory / (ADAPTER_CONFIG if adapters else CONFIG), neutral)
    if len(files) > 1:
        entries = [entry for file in files for entry in file.entries.values()]
        total = {
            "total_parameters": sum(prod(entry.shape) for entry in entries),
            "total_size": sum(entry.nbytes for entry in entries),
        }
        weight_map = {name: file.path.name for file in files for name in file.entries}
        _write_json(directory / INDEX, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})


def _write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    Disk().write_file(path, text.encode())


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

    ``bos_token_id`` and ``eos_token_id`` that neither the config nor ``generation_config.json`` states are
    the tokenizer's, in both: transformers looks nowhere else for where a text ends. A
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
    """Return the ids of a text's first and last token, as far as neither config has any."""
    tokens = {"bos_token_id": tokenizer.bos_token, "eos_token_id": tokenizer.eos_token}
    both = (config, _content(files, GENERATION_CONFIG))
    contents = {
        key: token.content if isinstance(token, _Token) else token
        for key, token in tokens.items()
        if token is not None and all(settings.get(key) is None for settings in both)
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
