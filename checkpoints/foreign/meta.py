"""Read Meta's own files of Llama: ``params.json`` and one ``consolidated.NN.pth`` for each tensor rank.

The parts of a tensor lie one after the other: along dim 0 for what Meta calls column-parallel (``wq``, ``w1``
and so on), along dim 1 for row-parallel (``wo``, ``w2``) and for an embedding that is cut by its width, as in
Llama 2; norms and rotary frequencies are the same in every part. Source: ``llama/model.py`` of
meta-llama/llama (2023) and ``llama3`` (2024).
"""

import re
from pathlib import Path
from typing import Any

from ...parallel_state import BadInput, Box, Piece
from ...storage.catalog import Catalog, Key, LazyTensor, in_one_file, listed
from ...storage.small_files import read_json
from ...storage.strict_json import shown
from ...storage.torch_archive import ViewFile, open_state_dict
from .checkpoint import ForeignCheckpoint, Stated, refuse_copies

FORM = "Meta's consolidated files"
PARAMS = "params.json"
_PART = re.compile(r"consolidated\.(\d\d)\.pth")
_ROWS = re.compile(r"output\.weight|.*\.(wq|wk|wv|w1|w3)\.weight")
_COLUMNS = re.compile(r".*\.(wo|w2)\.weight")
_EMBEDDING = "tok_embeddings.weight"
#: Meta's keys of facts, and the attribute of a config that states the same.
_FACTS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    # Mistral's files of this form state these.
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "sliding_window": "sliding_window",
}


def recognise(path: Path) -> bool:
    """Return whether this folder holds Meta's files."""
    return (path / PARAMS).is_file() and any(_PART.fullmatch(child.name) for child in path.iterdir())


def read(path: Path) -> ForeignCheckpoint:
    """Read the headers of every part; ``BadInput`` for a part that is missing or does not fit the others."""
    where = path / PARAMS
    params = read_json(where)
    numbers = sorted(int(match[1]) for child in path.iterdir() if (match := _PART.fullmatch(child.name)))
    if numbers != [*range(len(numbers))]:
        missing = min(set(range(numbers[-1])) - {*numbers})
        expected, part = "a part for every rank", path / f"consolidated.{missing:02d}.pth"
        raise BadInput(part, expected=expected, found="none", todo="Copy it too")
    files = [open_state_dict(path / f"consolidated.{number:02d}.pth") for number in numbers]
    names = files[0].tensors.keys()
    for file in files[1:]:
        if differing := sorted(names ^ file.tensors.keys()):
            raise BadInput(
                file.path, shown(differing[0]), expected=f"the tensors of {files[0].path.name}",
                found="another", todo="A part is of another checkpoint: copy all parts of one",
            )  # fmt: skip
    refuse_copies((file, file.path) for file in files)
    tensors = Catalog({name: _joined(name, files, params.get("dim")) for name in names})
    return ForeignCheckpoint(path, FORM, tensors, stated=_stated(params, where), names="meta")


def _joined(name: str, files: list[ViewFile], width: object) -> LazyTensor:
    """Return the tensor whose parts lie in the files, one after the other along the dim that Meta cuts."""
    parts = [file.tensors[name] for file in files]
    first = parts[0]
    dim = 0 if _ROWS.fullmatch(name) else 1 if _COLUMNS.fullmatch(name) else None
    if name == _EMBEDDING:  # Llama 2 cuts its width, Llama 3 the vocabulary
        dim = 0 if first.shape[1:] == (width,) else 1
    if dim is None:
        return in_one_file(files[0], name)
    if len({(part.dtype, part.shape[:dim], part.shape[dim + 1 :]) for part in parts}) > 1:
        part_shapes = ", ".join(f"{part.dtype} {[*part.shape]}" for part in parts)
        expected = "parts that differ in one dim"
        raise BadInput(files[0].path.parent, shown(name), expected=expected, found=part_shapes)
    pieces, at = [], 0
    for file, part in zip(files, parts, strict=True):
        box = Box.whole(part.shape).narrow(dim, at, at + part.shape[dim])
        pieces.append(Piece.plain(box, Key(file, name)))
        at += part.shape[dim]
    if name.endswith(".wo.weight") and type(width) is int and at < width:  # the last files may be missing
        expected, actual = f"{width} columns, as dim in {PARAMS} says", f"{at} in {len(files)} parts"
        todo = f"A file after consolidated.{len(files) - 1:02d}.pth is missing: copy it too"
        raise BadInput(files[0].path.parent, shown(name), expected=expected, found=actual, todo=todo)
    shape = tuple(at if d == dim else size for d, size in enumerate(first.shape))
    return LazyTensor(name, first.dtype, shape, listed(pieces))


def _stated(params: dict[str, Any], where: Path) -> dict[str, Stated]:
    """Return the facts in ``params.json``; Llama 2's leaves the vocabulary to its tokenizer (-1)."""
    arguments = {
        ours: Stated(params[key], f"{key} in {where}")
        for key, ours in _FACTS.items()
        if params.get(key) not in (None, -1)
    }
    if "n_heads" in params:
        arguments.setdefault("num_key_value_heads", Stated(params["n_heads"], f"n_heads in {where}"))
    arguments["rope_scaling"] = Stated(bool(params.get("use_scaled_rope")), f"use_scaled_rope in {where}")
    return arguments
