"""Write a Hugging Face model folder, with its weights in shards as transformers would cut them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from ...storage.disk import Disk
from ...storage.dtypes import BITS
from ...storage.file_names import ADAPTER_CONFIG, ADAPTER_MODEL, CONFIG, INDEX, SINGLE
from ...storage.files_beside_weights import copy_file
from ...storage.safetensors_writer import TensorWriter, Written

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


class HFFolderWriter:
    """Write a Hugging Face folder in ``directory``, an existing empty directory (see ``commit``).

    With ``again`` the directory may hold weight files of a run that was killed. With ``adapters`` the names
    are PEFT's. ``writers`` take the tensors; ``place[name]`` is the index of the writer that holds ``name``.
    ``finish`` closes them and writes the index, the config and the companions.
    """

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, object],
        tensors: Mapping[str, Spec],
        *,
        max_shard_size: int = MAX_SHARD_SIZE,
        companions: Sequence[Path] = (),
        disk: Disk | None = None,
        again: bool = False,
        adapters: bool = False,
    ):
        self.directory, self._config, self._companions = directory, config, companions
        self._disk, self._config_name = disk or Disk(), ADAPTER_CONFIG if adapters else CONFIG
        self._shards = {ADAPTER_MODEL: [*tensors]} if adapters else plan_shards(tensors, max_shard_size)
        self.place = {name: i for i, names in enumerate(self._shards.values()) for name in names}
        self.writers: list[TensorWriter] = []
        try:
            for file, names in self._shards.items():
                spec = {
                    name: tensors[name] for name in sorted(names, key=lambda n: (-BITS[tensors[n][0]], n))
                }
                metadata = {"format": "pt"}
                writer = TensorWriter(
                    directory / file,
                    spec,
                    metadata=metadata,
                    disk=self._disk,
                    again=again,
                    checksum=False,  # a Hugging Face folder has no place for one
                )
                self.writers.append(writer)
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> list[Written]:
        """Put everything on the disk, the index last; return the size of each file of weights."""
        written = [writer.close() for writer in self.writers]
        self._write_json(self._config_name, self._config)
        for companion in self._companions:
            copy_file(companion, self.directory / companion.name, self._disk)
        if len(self._shards) > 1:
            entries = [entry for writer in self.writers for entry in writer.entries.values()]
            total = {
                "total_parameters": sum(prod(entry.shape) for entry in entries),
                "total_size": sum(entry.nbytes for entry in entries),
            }
            weight_map = {name: file for file, names in self._shards.items() for name in names}
            self._write_json(INDEX, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})
        return written

    def abandon(self) -> None:
        """Give the descriptors back; the files stay for whoever owns the directory to remove."""
        for writer in self.writers:
            writer.abandon()

    def _write_json(self, name: str, value: object) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        self._disk.write_file(self.directory / name, text.encode())
