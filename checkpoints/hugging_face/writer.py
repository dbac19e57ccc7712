"""Write a Hugging Face model folder, with its weights in shards as transformers would cut them."""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from ...storage.disk import Disk
from ...storage.dtypes import BITS
from ...storage.file_names import ADAPTER_CONFIG, CONFIG, INDEX, SINGLE
from ...storage.safetensors_writer import TensorWriter

Spec = tuple[str, tuple[int, ...]]  # dtype by the format's name, and shape

#: transformers' own default until it was raised; hubs and tools handle files of this size well.
MAX_SHARD_SIZE = 5 * 10**9


def plan_shards(tensors: Mapping[str, Spec], max_shard_size: int = MAX_SHARD_SIZE) -> dict[str, list[str]]:
    """File name -> the tensors in it, in order.

    The cut is huggingface_hub's ``split_torch_state_dict_into_shards``: a file is closed when the next tensor
    would take it past ``max_shard_size`` bytes, and a tensor larger than that has a file to itself.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * BITS[dtype] // 8
        if size > max_shard_size:
            shards.append([name])
            continue
        if filled + size > max_shard_size:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    if current:
        shards.append(current)
    if len(shards) < 2:
        return {SINGLE: shards[0] if shards else []}
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(shards, 1)}


def open_file(path: Path, tensors: Mapping[str, Spec], *, again: bool = False) -> TensorWriter:
    """Return what writes a file of weights as transformers does; ``again``: as for ``TensorWriter``."""
    spec = {name: tensors[name] for name in sorted(tensors, key=lambda n: (-BITS[tensors[n][0]], n))}
    # Without a checksum: a Hugging Face folder has no place for one.
    return TensorWriter(path, spec, metadata={"format": "pt"}, again=again, checksum=False)


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
