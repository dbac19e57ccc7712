"""Read Megatron's distributed checkpoints (``torch_dist``) of Megatron-LM, Megatron-Bridge and NeMo.

Such a folder is one of DCP with ``metadata.json`` (which writer) and ``common.pt`` (arguments and all that is
no tensor). A tensor is whole, whatever layout wrote it. Layers that are alike lie in one tensor, with the
layer as its first dim; here they get names with numbers. Source: ``megatron/core/dist_checkpointing``,
``optimizer/distrib_optimizer.py``.
"""

import os
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from ...parallel_state import BadInput, Box, Piece, require
from ...storage.catalog import Catalog, Key, LazyTensor, in_one_file, listed
from ...storage.safe_open import contained
from ...storage.small_files import read_json
from ...storage.strict_json import shown
from ...storage.strides import View
from ...storage.torch_archive import Maker, ViewFile, nested, read_archive
from ...system import counted
from .checkpoint import ForeignCheckpoint
from .dcp import read_count, read_tensors
from .megatron_arguments import NAMES, Arguments, bridge_arguments, step_folder

FORM = "Megatron torch_dist"
#: The flag with which Megatron writes moments that do not depend on the ranks.
READABLE = "--dist-ckpt-optim-fully-reshardable"
_CONFIG, _COMMON = "metadata.json", "common.pt"
#: Names in ``.metadata`` beside those of DCP: the plans of all ranks, and Megatron's additions to both.
_PLANNER = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
_NAMES: dict[str, Maker | None] = {
    **dict.fromkeys(f"torch.distributed.checkpoint.planner.{name}" for name in _PLANNER),
    **dict.fromkeys(
        f"megatron.core.dist_checkpointing.strategies.torch.{name}"
        for name in ("MCoreMetadata", "MCoreSavePlan")
    ),
}
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\..+")
_STACK = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_EMBEDDING = "embedding.word_embeddings.weight"
#: As many layers as a config may have, and more.
MOST_LAYERS = 1 << 16


def recognise(path: Path) -> bool:
    """Return whether this is a folder of Megatron's distributed checkpoints, or of their steps; a copy that
    lacks one of Megatron's two files is one too.
    """
    folder = step_folder(path) if path.is_dir() else path
    present = [name for name in (_CONFIG, _COMMON) if os.path.lexists(folder / name)]
    return folder.is_dir() and (len(present) == 2 or (bool(present) and any(folder.glob("*.distcp"))))


def read(path: Path) -> ForeignCheckpoint:
    """Read the headers; ``BadInput`` for another backend than ``torch_dist`` and for what is damaged."""
    folder = step_folder(path)
    backend = read_json(contained(folder, _CONFIG)).get("sharded_backend")
    where, todo = folder / _CONFIG, "Save with --ckpt-format torch_dist"
    require(backend == "torch_dist", where, "sharded_backend", "torch_dist", shown(backend), todo)
    file = ViewFile(contained(folder, _COMMON))
    common = read_archive(file, allowed=NAMES)
    if not isinstance(common, dict):
        raise BadInput(folder / _COMMON, expected="a dict", found=type(common).__name__)
    arguments = Arguments(common.get("args"), folder / _COMMON)
    if not arguments.known and (model_section := bridge_arguments(folder)) is not None:
        arguments = Arguments(*model_section)
    arguments.check()
    tensors, objects = read_tensors(folder, _NAMES)
    weights = Catalog()
    states: dict[str, Catalog] = {}
    unread = [name for name in objects if not _is_extra(name)]
    # Whatever holds the model may be in every name, such as ``module.`` in NeMo's.
    embeddings = (name.removesuffix(_EMBEDDING) for name in tensors if name.endswith(_EMBEDDING))
    prefix = min(embeddings, key=len, default="")
    for stored, tensor in tensors.items():
        if (match := _STATE.fullmatch(stored)) is not None:
            states.setdefault(match[1], Catalog())[match[2].removeprefix(prefix)] = tensor
        elif _OPTIMIZER.fullmatch(stored):
            unread.append(stored)
        elif not _is_extra(stored):
            weights[stored.removeprefix(prefix)] = tensor
    checkpoint = ForeignCheckpoint(folder, FORM, weights, names="megatron", stated=arguments.stated())
    checkpoint.step = common["iteration"] if type(common.get("iteration")) is int else None
    checkpoint.skip([*filter(_is_extra, (*tensors, *objects))], "_extra_state, without weights")
    _take_states(checkpoint, states, unread, common, file)
    checkpoint.tensors = Catalog(_numbered(checkpoint.tensors, folder))
    moments = checkpoint.moments.items()
    checkpoint.moments = {kind: Catalog(_numbered(stored, folder)) for kind, stored in moments}
    return checkpoint


def _is_extra(name: str) -> bool:
    return "._extra_state" in name


def _take_states(
    checkpoint: ForeignCheckpoint,
    states: dict[str, Catalog],
    unread: list[str],
    common: Mapping[Any, Any],
    file: ViewFile,
) -> None:
    """Take the moments and, with them, the optimizer's own weights; say what is left."""
    moments = {kind: states.get(kind, Catalog()) for kind in ("exp_avg", "exp_avg_sq")}
    if all(moments.values()):
        checkpoint.moments = {kind: _shaped(checkpoint, kind, stored) for kind, stored in moments.items()}
        own = states.get("param") or states.get("fp32_param") or Catalog()
        checkpoint.tensors |= _shaped(checkpoint, "fp32_param", own)
        if own:
            checkpoint.skipped.append(
                "the weights are the optimizer's, in fp32; --dtype bfloat16 rounds them to the model's own"
            )
        checkpoint.updates = _updates(common.get("optimizer"), file)
    elif unreadable := [name for name in unread if _OPTIMIZER.fullmatch(name)]:
        checkpoint.skipped.append(
            f"no moments: {counted(len(unreadable), 'entry')} of the optimizer, such as {unreadable[0]}, "
            f"which the ranks that wrote them alone could read. Megatron writes readable ones with {READABLE}"
        )
        unread = [name for name in unread if name not in unreadable]
    checkpoint.skip(unread, "beside the weights")


def _updates(stored: object, file: ViewFile) -> int | None:
    """Return the number of updates, wherever a chain of optimizers has it.

    It is in the parameter groups, as a float by torch's Adam, or beside the states, as a tensor.
    """
    for name, entry in nested(stored, _COMMON):
        if name.endswith("state.common_step"):
            entry = [{"step": entry}]
        elif not name.endswith("param_groups") or not isinstance(entry, list):
            continue
        for step in (group.get("step") for group in entry if isinstance(group, dict)):
            if isinstance(step, View):
                return read_count(in_one_file(file, file.add(step)), file.path, name)
            if type(step) is int or (isinstance(step, float) and step.is_integer()):
                return int(step)
    return None


def _shaped(checkpoint: ForeignCheckpoint, kind: str, states: Catalog) -> Catalog:
    """Return the tensors of a state in the shapes of their weights.

    ``fully_sharded_model_space`` cuts each rank's part of a weight as a flat row of numbers. The stored
    tensor then has one more dim: as many indices along each dim as there are parts, and the place in a part.
    """
    shaped = Catalog()
    for name, state in states.items():
        if (weight := checkpoint.tensors.get(name)) is None:
            todo = "The optimizer and the model are not of one checkpoint"
            key, expected = f"{kind} of {shown(name)}", "a weight of that name"
            raise BadInput(checkpoint.path, key, expected=expected, found="none", todo=todo)
        if state.shape == weight.shape:
            shaped[name] = state
            continue
        parts = state.shape[:-1]
        split = [divmod(m, n or -1) for m, n in zip(weight.shape, parts, strict=False)]
        size = tuple(part_size for part_size, _ in split)
        fits = len(parts) == len(weight.shape) and not any(rest for _, rest in split) and all(parts)
        if not fits or prod(state.shape) != prod(weight.shape):
            key = f"{kind} of {shown(name)}"
            raise BadInput(checkpoint.path, key, expected=[*weight.shape], found=[*state.shape])
        parts_of = (part for piece in state.near(state.box) for part in _unflattened(piece, size))
        shaped[name] = LazyTensor(name, state.dtype, weight.shape, listed(parts_of))
    return shaped


def _unflattened(piece: Piece[Key], size: tuple[int, ...]) -> Iterator[Piece[Key]]:
    """Yield a flat piece of a part of ``size`` as boxes of the whole tensor."""
    file, key = piece.stored
    assert isinstance(file, ViewFile), file
    view, first = file.tensors[key], piece.box.start[-1]
    corner = tuple(at * n for at, n in zip(piece.box.start, size, strict=False))
    for box, at in _boxes_of(size, first, piece.box.stop[-1]):
        part = View.row_major(view.dtype, box.shape, view.begin + (at - first) * view.itemsize)
        yield Piece.plain(box.shift(corner), Key(file, file.add(part)))


def _boxes_of(size: tuple[int, ...], first: int, last: int) -> Iterator[tuple[Box, int]]:
    """Yield boxes that hold elements ``first`` to ``last`` of a row-major tensor, each with its first one."""
    if first >= last:
        return
    if len(size) <= 1:
        yield Box((first,) if size else (), (last,) if size else ()), first
        return
    row = prod(size[1:])
    whole = -(-first // row), last // row
    if whole[0] < whole[1]:
        yield Box((whole[0], *(0 for _ in size[1:])), (whole[1], *size[1:])), whole[0] * row
    ends = [(first, min(last, whole[0] * row)), (max(first, whole[1] * row), last)]
    for begin, end in ends if whole[0] <= whole[1] else [(first, last)]:
        number = begin // row
        for box, at in _boxes_of(size[1:], begin - number * row, end - number * row):
            yield Box((number, *box.start), (number + 1, *box.stop)), number * row + at


def _numbered(tensors: Catalog, path: Path) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors with each layer of a stack as a tensor of its own."""
    for name, tensor in tensors.items():
        if (match := _STACK.fullmatch(name)) is None:
            yield name, tensor
            continue
        count = tensor.shape[0] if tensor.shape else 0
        require(count <= MOST_LAYERS, path, shown(name), f"at most {MOST_LAYERS:,} layers", f"{count:,}")
        layers: dict[int, list[Piece[Key]]] = {number: [] for number in range(count)}
        for piece in tensor.near(tensor.box):
            first, inner = piece.box.start[0], Box(piece.box.start[1:], piece.box.stop[1:])
            for number in range(first, piece.box.stop[0]):
                start = (piece.start[0] + number - first, *piece.start[1:])
                row = Piece(inner, piece.stored, start, piece.dims[1:], piece.steps[1:])
                layers[number].append(row)
        for number, pieces in layers.items():
            layer = f"decoder.layers.{number}.{match[1]}"
            yield layer, LazyTensor(layer, tensor.dtype, tensor.shape[1:], listed(pieces))
