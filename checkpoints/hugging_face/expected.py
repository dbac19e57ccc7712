"""List what a Hugging Face folder must hold for its config: each tensor, its shape, a dtype of weights."""

from __future__ import annotations

import hashlib
import re

import torch

from ...models import Family, ModelConfig
from ...parallel_state import BadInput, Box
from ...storage.dtypes import WEIGHTS
from ...storage.safetensors_reader import TensorFile
from .folder import HFFolder

Found = dict[str, tuple[TensorFile, str]]


def expected_tensors(folder: HFFolder, family: Family, config: ModelConfig) -> Found:
    """Find each of the model's HF tensors: return its file and its key in that file. Reads headers only.

    Raises ``BadInput`` for a tensor that is missing, left over, of another shape, or quantised.
    """
    _, shapes = family.links(config)
    ignored = ignored_names(family, config)
    found: Found = {name: (file, name) for name, (file, _) in folder.tensors.items()}
    found = _with_prefix(found, family, shapes, ignored)
    found = {name: place for name, place in found.items() if not ignored.fullmatch(name)}
    _note_further(folder, family, config)
    if config.tie_word_embeddings and family.tied_head in found:
        _check_tied(folder, found, family, shapes)
        del found[family.tied_head]
    _check_names(folder, found, shapes, family)
    for name, shape in shapes.items():
        file, key = found[name]
        entry = file.tensors[key]
        if entry.dtype not in WEIGHTS:
            todo = "Quantised checkpoints are not supported"
            raise BadInput(
                file.path, name, expected=f"one of {', '.join(WEIGHTS)}", found=entry.dtype, todo=todo
            )
        if entry.shape != shape:
            todo = "The config and the weights are not of one model"
            raise BadInput(file.path, name, expected=list(shape), found=list(entry.shape), todo=todo)
    return {name: found[name] for name in shapes}


def _with_prefix(
    found: Found, family: Family, shapes: dict[str, tuple[int, ...]], ignored: re.Pattern[str]
) -> Found:
    prefix = family.optional_prefix
    if not prefix or any(name.startswith(prefix) for name in found):
        return found
    known = {name: prefix + name in shapes or ignored.fullmatch(prefix + name) for name in found}
    return {prefix + name if known[name] else name: place for name, place in found.items()}


def ignored_names(family: Family, config: ModelConfig) -> re.Pattern[str]:
    """Return a pattern of tensors that may exist and are not read: old buffers, blocks after the last one."""
    patterns = [re.escape(one).replace(re.escape("{i}"), r"\d+") for one in family.ignorable]
    patterns += [re.escape(prefix) + ".+" for prefix in _further(family, config)]
    return re.compile("|".join(patterns) or "(?!)")


def _further(family: Family, config: ModelConfig) -> tuple[str, ...]:
    numbers = range(config.num_hidden_layers, config.num_hidden_layers + config.further_blocks)
    return tuple(family.further.format(i=number) for number in numbers)


def _note_further(folder: HFFolder, family: Family, config: ModelConfig) -> None:
    prefixes = _further(family, config)
    names = [name for name in folder.tensors if prefixes and name.startswith(prefixes)]
    if names:
        folder.warnings.append(
            f"{folder.path}: {len(names)} tensors of blocks that predict further tokens are not read, as by "
            f"transformers: {names[0]}, ..."
        )


def _check_tied(folder: HFFolder, found: Found, family: Family, shapes: dict[str, tuple[int, ...]]) -> None:
    """Check that a repeated output layer is the embedding, byte for byte."""
    embedding = next(iter(shapes))
    if embedding not in found:
        return
    first, second = (_sha256(*found[name]) for name in (embedding, family.tied_head))
    if first != second:
        raise BadInput(
            folder.path,
            family.tied_head,
            expected=f"the bytes of {embedding} (sha256 {first[:12]}), as tie_word_embeddings says",
            found=f"others (sha256 {second[:12]})",
            todo="Set tie_word_embeddings to false in config.json if the output layer is its own",
        )


def _sha256(file: TensorFile, key: str) -> str:
    """Return the SHA-256 of a tensor's bytes, read in slices of its first dim."""
    digest, entry = hashlib.sha256(), file.tensors[key]
    rows = max(1, (16 << 20) // max(1, entry.nbytes // max(1, entry.shape[0])))
    for start in range(0, entry.shape[0], rows):
        box = Box.whole(entry.shape).narrow(0, start, min(start + rows, entry.shape[0]))
        digest.update(file.read(key, box).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_names(folder: HFFolder, found: Found, shapes: dict[str, tuple[int, ...]], family: Family) -> None:
    missing, extra = [n for n in shapes if n not in found], [n for n in found if n not in shapes]
    if missing:
        hint = ""
        first = missing[0]
        if extra and any(name.endswith(other) or other.endswith(name) for name in missing for other in extra):
            hint = f"The names lack or add a prefix: {extra[0]} is there"
        elif first == family.tied_head:
            hint = "Set tie_word_embeddings to true in config.json if the output layer is the embedding"
        else:
            hint = "The config says that the model has it; is num_hidden_layers right, or a shard left out?"
        raise BadInput(
            folder.path, first, expected=f"{len(shapes)} tensors", found=f"{len(missing)} missing", todo=hint
        )
    if extra:
        todo = "The config does not describe it; nothing is ignored silently"
        raise BadInput(folder.path, sorted(extra)[0], expected="no such tensor", found="one", todo=todo)
