"""Write a Hugging Face model folder, with its weights in shards as transformers would cut them."""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from ...storage.disk import Disk
from ...storage.dtypes import BITS
from ...storage.file_names import ADAPTER_CONFIG, CONFIG, INDEX
from ...storage.safetensors_writer import TensorWriter

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
