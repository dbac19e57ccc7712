"""Join a foreign checkpoint, a table of names and a config: each tensor of Hugging Face as views of files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...models import Family, ModelConfig
from ...parallel_state import BadInput, Box
from ...storage.coverage import first_flaw
from ...storage.dtypes import TORCH, WEIGHTS
from ...storage.torch_archive import View
from ..hugging_face.expected import ignored_names
from .checkpoint import Chunk, ForeignCheckpoint, ForeignTensor
from .rules import Piece, Table, known_tables, pieces, rename_all, table_named

#: Elements that are compared at once.
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Tables:
    """Hold all tensors of a foreign checkpoint by Hugging Face's names: weights, and moments by kind."""

    weights: dict[str, ForeignTensor]
    moments: dict[str, dict[str, ForeignTensor]]


def choose_table(
    checkpoint: ForeignCheckpoint, names: str | None, hf: Mapping[str, tuple[int, ...]]
) -> Table:
    """Return the table of names: the one asked for, the format's own, Hugging Face's names, or a known one
    whose ``detect`` is there. ``BadInput`` if none of these fits.
    """
    if (name := names or checkpoint.names) is not None:
        return table_named(name)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    if (table := rename_all(shapes, hf)) is not None:
        return table
    for known in known_tables():
        table = table_named(known)
        if table.detect and table.prefix + table.detect in shapes:
            return table
    seen = ", ".join(sorted(shapes)[:3])
    raise BadInput(
        checkpoint.path, "names",
        expected="Hugging Face's names or those of a known table", found=f"{seen}, ...",
        todo=f"Say --names with one of {', '.join(known_tables())}, or with a TOML file of rules",
    )  # fmt: skip


def assemble(checkpoint: ForeignCheckpoint, table: Table, family: Family, config: ModelConfig) -> Tables:
    """Return every tensor of the model, and of its moments where they are there, as views of files.

    ``BadInput`` for a tensor that is missing, left over, quantised, of another shape, or covered in part.
    Moments that only some weights have are left out: a run cannot go on from them.
    """
    _, hf = family.links(config)
    with_head = hf_shapes(family, config)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    tied = pieces(table, family.model_type, shapes, with_head, config, checkpoint.path)
    ignored = [ignored_names(family, config), *map(re.compile, table.ignored)]
    _check_names(checkpoint, table, ignored, hf, tied)
    if family.tied_head in tied and family.tied_head not in hf:
        _check_tied(checkpoint, *(
            assembled(checkpoint, name, with_head[name], tied.get(name, ()), checkpoint.tensors)
            for name in (next(iter(hf)), family.tied_head)
        ))  # fmt: skip
        del tied[family.tied_head]
    weights = {
        name: assembled(checkpoint, name, shape, tied[name], checkpoint.tensors) for name, shape in hf.items()
    }
    used = {piece.foreign for tensor_pieces in tied.values() for piece in tensor_pieces}
    if without := sorted(
        {foreign_name for table in checkpoint.moments.values() for foreign_name in used - table.keys()}
    ):
        others = f" and {len(without) - 1} more weights" if without[1:] else ""
        checkpoint.skipped.append(f"the moments are left out: there are none of {without[0]}{others}")
        checkpoint.moments = {}
    trained = {
        moment: {name: assembled(checkpoint, name, shape, tied[name], tensors) for name, shape in hf.items()}
        for moment, tensors in checkpoint.moments.items()
    }
    return Tables(weights, trained)


def _check_names(
    checkpoint: ForeignCheckpoint,
    table: Table,
    ignored: Sequence[re.Pattern[str]],
    hf: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, list[Piece]],
) -> None:
    """Refuse a model's tensor that no rule finds, and a foreign tensor that no rule uses."""
    missing = [name for name in hf if name not in tied]
    used = {piece.foreign for tensor_pieces in tied.values() for piece in tensor_pieces}
    extra = sorted(
        name
        for name in checkpoint.tensors
        if name not in used
        and not any(pattern.fullmatch(name.removeprefix(table.prefix)) for pattern in ignored)
    )
    if missing:
        there = f"{len(missing)} of {len(hf)} missing" + (
            f"; not used: {', '.join(extra[:3])}" if extra else ""
        )
        todo = "The config describes another model, or --names is the wrong table"
        raise BadInput(checkpoint.path, missing[0], expected="a tensor for it", found=there, todo=todo)
    if extra:
        todo = "The config does not describe it; nothing is ignored silently"
        raise BadInput(checkpoint.path, extra[0], expected="no such tensor", found="one", todo=todo)


def hf_shapes(family: Family, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Hugging Face's tensors, with the output layer that a tied model may repeat."""
    _, shapes = family.links(config)
    repeated = {family.tied_head: next(iter(shapes.values()))} if config.tie_word_embeddings else {}
    return shapes | repeated


def _check_tied(checkpoint: ForeignCheckpoint, embedding: ForeignTensor, head: ForeignTensor) -> None:
    """Refuse an output layer that is stored besides the embedding that it is tied to, and differs from it."""
    rows = max(1, _AT_ONCE // max(1, embedding.shape[1]))
    for start in range(0, embedding.shape[0], rows):
        box = Box.whole(embedding.shape).narrow(0, start, min(start + rows, embedding.shape[0]))
        if embedding.dtype != head.dtype or not torch.equal(
            *(_bytes(tensor, box) for tensor in (embedding, head))
        ):
            todo = "Set tie_word_embeddings to false in config.json if the output layer is its own"
            raise BadInput(
                checkpoint.path, "output layer", expected="the embedding, as tie_word_embeddings says",
                found="other numbers", todo=todo,
            )  # fmt: skip


def _bytes(tensor: ForeignTensor, box: Box) -> torch.Tensor:
    """Return a box of an assembled tensor, bit for bit."""
    out = torch.empty(box.shape, dtype=TORCH[tensor.dtype])
    for part in tensor.chunks:
        if (overlap := part.box.intersect(box)) is not None:
            out[overlap.within(box).slices] = part.file.read(
                part.file.add(part.view), overlap.within(part.box)
            )
    return out.view(torch.uint8)


def assembled(
    checkpoint: ForeignCheckpoint,
    name: str,
    shape: tuple[int, ...],
    made_of: Iterable[Piece],
    tensors: Mapping[str, ForeignTensor],
) -> ForeignTensor:
    """Return one tensor of Hugging Face as the views that its pieces have in the chunks of their tensors."""
    parts, dtypes = [], set()
    for piece in made_of:
        tensor = tensors[piece.foreign]
        dtypes.add(tensor.dtype)
        if tensor.dtype not in WEIGHTS:
            todo = "Quantised weights are not read; convert the checkpoint before it was quantised"
            raise BadInput(
                checkpoint.path,
                piece.foreign,
                expected=f"one of {', '.join(WEIGHTS)}",
                found=tensor.dtype,
                todo=todo,
            )
        parts += [part for chunk in tensor.chunks if (part := _located(piece, chunk)) is not None]
    if len(dtypes) > 1:
        raise BadInput(checkpoint.path, name, expected="one dtype", found=", ".join(sorted(dtypes)))
    if flaw := first_flaw(Box.whole(shape), [part.box for part in parts]):
        todo = "The checkpoint is incomplete: a part of it was not written or not copied"
        raise BadInput(checkpoint.path, name, expected="each element once", found=str(flaw), todo=todo)
    return ForeignTensor(dtypes.pop(), shape, tuple(parts))


def _located(piece: Piece, chunk: Chunk) -> Chunk | None:
    """Return the part of a piece that lies in a chunk, as a view of the chunk's file.

    Along each dim the foreign indices of a piece are start, start + step, ...; those inside of the chunk are
    again such a row.
    """
    fixed = set(range(len(piece.start))) - set(piece.dims)
    if any(not chunk.box.start[d] <= piece.start[d] < chunk.box.stop[d] for d in fixed):
        return None
    first, count = [], []
    at = list(piece.start)
    for size, dim, step in zip(piece.box.shape, piece.dims, piece.steps, strict=True):
        low, high = 0, size
        if dim is not None:
            low = max(0, -(-(chunk.box.start[dim] - piece.start[dim]) // step))
            high = min(size, -(-(chunk.box.stop[dim] - piece.start[dim]) // step))
            at[dim] += low * step
        if low >= high:
            return None
        first.append(low)
        count.append(high - low)
    inside = [a - b for a, b in zip(at, chunk.box.start, strict=True)]
    view: View = chunk.view.along(inside, piece.dims, piece.steps, tuple(count))
    start = tuple(a + b for a, b in zip(piece.box.start, first, strict=True))
    box = Box(start, tuple(a + b for a, b in zip(start, count, strict=True)))
    return Chunk(box, chunk.file, view)
