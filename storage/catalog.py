"""Give the whole tensors of any checkpoint by name, to be read a box at a time.

Every reader of files returns a catalog. ``renamed`` makes of it the catalog of other names. A load reads
boxes of its tensors; a conversion plans over the pieces of such boxes, and reads them in blocks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..parallel_state import BadCheckpoint, BadInput, Box, Piece
from .crc import Checksum
from .dtypes import BITS, TORCH, look_at
from .safetensors_reader import TensorFile
from .strides import blocks, first_flaw

#: Elements of ``LazyTensor.in_blocks``.
AT_ONCE = 1 << 22
Shape = tuple[int, ...]
#: The checksums of files into which their bytes are counted as they are read.
Seen = Mapping[TensorFile, Checksum]
T = TypeVar("T")


class Key(NamedTuple):
    """Name a tensor in a file."""

    file: TensorFile
    key: str


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """Describe a whole tensor that lies in files: the format's name of its dtype, its shape, its pieces.

    ``near`` gives, for a box, pieces of the tensor among which are all that hold elements of the box:
    ``listed`` ones, or those that a rule computes when they are asked for.
    """

    name: str
    dtype: str
    shape: Shape
    near: Callable[[Box], Iterable[Piece[Key]]]

    @property
    def box(self) -> Box:
        """Return the box of all elements."""
        return Box.whole(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all elements."""
        return self.box.size * BITS[self.dtype] // 8

    def pieces(self, box: Box) -> list[Piece[Key]]:
        """Return the pieces of ``box``; each element is in one of them.

        Raises ``BadCheckpoint`` for a tensor that the files hold only in part.
        """
        pieces = [piece for part in self.near(box) if (piece := part.narrow(box)) is not None]
        covered = sum(piece.box.size for piece in pieces)
        if covered != box.size:
            expected = f"each of {box.size:,} elements once"
            todo = "The files do not cover this tensor: it is incomplete or overlaps itself"
            raise BadCheckpoint("checkpoint", self.name, expected=expected, found=f"{covered:,}", todo=todo)
        return pieces

    def in_blocks(self, seen: Seen | None = None) -> Iterator[Tensor]:
        """Yield all elements, finite or not, some at a time."""
        for box in blocks(self.box, AT_ONCE):
            yield self.read(box, finite=False, seen=seen).contiguous()

    def read(self, box: Box | None = None, *, finite: bool = True, seen: Seen | None = None) -> Tensor:
        """Return the elements of ``box`` (default: all) in the stored dtype.

        Raises ``BadInput`` for numbers that are not finite, unless ``finite`` is false.
        """
        box = self.box if box is None else box
        parts = []
        for (file, key), hull, pieces in _reads(self.pieces(box)):
            numbers = file.read(key, hull)
            if seen is not None and (checksum := seen.get(file)) is not None:
                file.count_in(key, hull, numbers, checksum)
            parts += [(piece.box, piece.of(numbers, hull.start), file.path) for piece in pieces]
        if not parts:
            return torch.empty(box.shape, dtype=TORCH[self.dtype])  # all of it is padding
        read = [(part, numbers) for part, numbers, _ in parts]
        out, _ = join(box, read, lambda dtype: torch.empty(box.shape, dtype=dtype))
        if finite and not look_at(out).finite:
            path = next(path for _, numbers, path in parts if not bool(numbers.isfinite().all()))
            raise BadInput(path, self.name, expected="finite numbers", found="a NaN or an infinity")
        return out


class Catalog(dict[str, LazyTensor]):
    """Hold tensors by name; one that is not there is an error of the checkpoint."""

    def __missing__(self, name: str) -> LazyTensor:
        raise BadCheckpoint("checkpoint", name, expected="a tensor", found="none of that name")

    @property
    def stored_keys(self) -> dict[TensorFile, set[str]]:
        """Return the files in which tensors lie, in order of first use, and the keys of these there."""
        keys: dict[TensorFile, set[str]] = {}
        for tensor in self.values():
            for piece in tensor.near(tensor.box):
                keys.setdefault(piece.stored.file, set()).add(piece.stored.key)
        return keys


def listed(pieces: Iterable[Piece[Key]]) -> Callable[[Box], Iterable[Piece[Key]]]:
    """Return these pieces of a tensor for any box of it."""
    all_pieces = tuple(pieces)
    return lambda box: all_pieces


def in_one_file(file: TensorFile, key: str) -> LazyTensor:
    """Return the tensor that lies whole, as ``key``, in one file."""
    entry = file.tensors[key]
    whole = Piece.plain(Box.whole(entry.shape), Key(file, key))
    return LazyTensor(key, entry.dtype, entry.shape, listed([whole]))


def renamed(
    catalog: Mapping[str, LazyTensor], names: Mapping[str, Sequence[Piece[str]]], where: object = "checkpoint"
) -> Catalog:
    """Return the tensors of ``names``, each made of pieces of tensors of ``catalog``; without those for which
    the catalog has not all. ``BadInput`` names ``where``, and one whose pieces are of several dtypes.
    """
    tensors = Catalog()
    for name, pieces in names.items():
        if not all(piece.stored in catalog for piece in pieces):
            continue
        sources = [catalog[piece.stored] for piece in pieces]
        first = sources[0]
        if len(pieces) == 1 and pieces[0] == Piece.plain(first.box, pieces[0].stored):
            tensors[name] = replace(first, name=name)  # the same tensor, by another name
            continue
        if len(dtypes := {source.dtype: source.name for source in sources}) > 1:
            mixed = ", ".join(f"{dtype} in {dtypes[dtype]}" for dtype in sorted(dtypes))
            todo = "Write all tensors that belong together in the same dtype"
            raise BadInput(where, name, expected="one dtype", found=mixed, todo=todo)
        shape = tuple(map(max, zip(*(piece.box.stop for piece in pieces), strict=True)))
        tensors[name] = LazyTensor(name, first.dtype, shape, partial(_through, pieces, sources))
    return tensors


def _through(pieces: Sequence[Piece[str]], tensors: Sequence[LazyTensor], box: Box) -> Iterator[Piece[Key]]:
    """Yield, of pieces of tensors of other names, those of ``box`` in files."""
    for whole, tensor in zip(pieces, tensors, strict=True):
        if (piece := whole.narrow(box)) is not None:
            for part in tensor.near(piece.hull):
                if (stored := piece.through(part)) is not None:
                    yield stored


def first_difference(
    expected: Mapping[str, T], actual: Mapping[str, T]
) -> tuple[str, T | None, T | None] | None:
    """Return the first name for which two tables have not the same, with what each has; ``None`` if equal."""
    names = (name for name in (*expected, *actual) if expected.get(name) != actual.get(name))
    return next(((name, expected.get(name), actual.get(name)) for name in names), None)


def check_covered(where: object, catalog: Catalog) -> None:
    """Refuse a tensor of which the files do not hold each element once."""
    for name, tensor in catalog.items():
        boxes = [piece.box for piece in tensor.near(tensor.box)]
        if boxes != [tensor.box] and (flaw := first_flaw(tensor.box, boxes)):
            todo = "The checkpoint is incomplete: a part of it was not written or not copied"
            raise BadInput(where, name, expected="each element once", found=str(flaw), todo=todo)


def _reads(pieces: Iterable[Piece[Key]]) -> list[tuple[Key, Box, list[Piece[Key]]]]:
    """Return what to read for the pieces: boxes of stored tensors, each with the pieces that are in it.

    Pieces with steps lie between each other: those whose hulls overlap are read together.
    """
    by_key: dict[Key, list[tuple[Box, list[Piece[Key]]]]] = {}
    for piece in pieces:
        hull, together = piece.hull, [piece]
        reads_of_key = by_key.setdefault(piece.stored, [])
        if not piece.dense:
            for overlapping in [read for read in reads_of_key if read[0].intersect(hull)]:
                reads_of_key.remove(overlapping)
                hull, together = hull.around(overlapping[0]), overlapping[1] + together
        reads_of_key.append((hull, together))
    return [(key, hull, together) for key, reads in by_key.items() for hull, together in reads]


def join(
    box: Box, parts: Sequence[tuple[Box, Tensor]], empty: Callable[[torch.dtype], Tensor]
) -> tuple[Tensor, bool]:
    """Put the parts of ``box`` together; return the tensor, and whether it is the only part, not copied.

    ``empty`` allocates the tensor if there are several parts.
    """
    first = parts[0][1]
    if len(parts) == 1 and first.is_contiguous():
        return first, True
    joined = empty(first.dtype)
    for part, numbers in parts:
        joined[part.within(box).slices] = numbers
    return joined, False
