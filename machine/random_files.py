"""Make models and files to measure with: small Llamas, Hugging Face folders of any size, token files.

No model is in memory for a folder; all content is random.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..checkpoints.hugging_face import writer
from ..data.token_writer import TokenWriter
from ..models import family_of
from ..parallel_state import Box
from ..storage.dtypes import TORCH

if TYPE_CHECKING:
    from ..models import CausalLM


@cache
def _pool() -> torch.Tensor:
    """Return the numbers that every folder is filled with."""
    return torch.from_numpy(np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32))


def write_hf_folder(
    folder: Path,
    config: Mapping[str, Any],
    *,
    dtype: str = "F32",
    max_shard_size: int = writer.MAX_SHARD_SIZE,
) -> int:
    """Write a new folder as transformers would save it; return the bytes of its weights.

    ``dtype``: by the format's name. Tensors differ from each other, and so do neighbouring elements of a
    small one.
    """
    family = family_of(config)
    _, shapes = family.links(family.from_hf(config))
    pool = _pool()
    folder.mkdir(parents=True)
    spec = {name: (dtype, shape) for name, shape in shapes.items()}
    shards = writer.plan_shards(spec, max_shard_size)
    files = [writer.open_file(folder / file, {n: spec[n] for n in names}) for file, names in shards.items()]
    file_of = {name: file for file in files for name in file.entries}
    for number, (name, shape) in enumerate(shapes.items()):
        flat, at, begin = torch.empty(torch.Size(shape).numel(), dtype=TORCH[dtype]), 0, -number % len(pool)
        while at < flat.numel():  # each tensor begins elsewhere in the pool, and goes round
            piece = pool[begin : begin + flat.numel() - at]
            flat[at : at + len(piece)] = piece
            at, begin = at + len(piece), 0
        file_of[name].write(name, Box.whole(shape), flat.view(shape))
    size = sum(file.close().size for file in files)
    writer.write_config_and_index(folder, family.to_hf(family.from_hf(config)), files)
    return size


def write_tokens(name: Path, *, count: int = 4000, vocab_size: int = 131, seed: int = 0) -> Path:
    """Write a token file of random ids."""
    with TokenWriter(name, vocab_size=vocab_size) as tokens:
        tokens.add(np.random.default_rng(seed).integers(0, vocab_size, count))
        tokens.commit()
    return name


def llama(
    width: int, layers: int, *, ids: int, heads: int = 8, groups: int = 4, length: int = 512, **other: Any
) -> dict[str, Any]:
    """Return a config of Llama's proportions: ``ids`` in the vocabulary, ``groups`` of key/value heads."""
    return {
        "model_type": "llama",
        "vocab_size": ids,
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": length,
        **other,
    }


def built(config: dict[str, Any], **options: Any) -> "CausalLM":
    """Build a model; ``options`` are those of its family's ``build``."""
    family = family_of(config)
    return family.build(family.from_hf(config), **options)
