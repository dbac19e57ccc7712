"""Make Hugging Face folders of any size with random weights and no model in memory, and hash their files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoints.hugging_face.writer import MAX_SHARD_SIZE, HFFolderWriter
from ..models import family_of
from ..parallel_state import Box
from ..storage.dtypes import TORCH

_DRAWN = 1 << 22


def write_hf_folder(
    folder: Path, config: Mapping[str, Any], *, dtype: str = "F32", max_shard_size: int = MAX_SHARD_SIZE
) -> int:
    """Write a new folder as transformers would save it; return the bytes of its weights.

    ``dtype``: by the format's name. Tensors differ from each other, and so do neighbouring elements of a
    small one.
    """
    family = family_of(config)
    _, shapes = family.links(family.from_hf(config))
    pool = torch.from_numpy(np.random.default_rng(0).standard_normal(_DRAWN, dtype=np.float32)).to(
        TORCH[dtype]
    )
    folder.mkdir(parents=True)
    spec = {name: (dtype, shape) for name, shape in shapes.items()}
    writer = HFFolderWriter(folder, family.to_hf(family.from_hf(config)), spec, max_shard_size=max_shard_size)
    for number, (name, shape) in enumerate(shapes.items()):
        flat = torch.empty(torch.Size(shape).numel(), dtype=pool.dtype)
        for at in range(0, flat.numel(), _DRAWN):
            flat[at : at + _DRAWN] = pool.roll(number)[: flat.numel() - at]
        writer.writers[writer.place[name]].write(name, Box.whole(shape), flat.view(shape))
    return sum(one.size for one in writer.finish())


def contents(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder, by its path there."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
