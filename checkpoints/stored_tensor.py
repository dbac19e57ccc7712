"""Define what a manifest says about one tensor: its parts, listed one by one or stated by a grid.

A run cuts each tensor evenly, so a line for each part would repeat the same rule a thousand times. A grid is
this rule. Single parts are computed from it when they are needed.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Annotated, Literal, Self

from pydantic import Field

from ..parallel_state import BadCheckpoint, BadInput, Box, Declaration, Layout
from ..storage.catalog import first_difference
from ..storage.dtypes import BITS
from ..storage.strict_json import Count, StrictRecord, shown
from ..storage.strides import check_coverage

Bounds = tuple[Count, ...]
Role = Literal["owner", "replica"]


def check_same_shapes(
    where: object,
    expected_shapes: Mapping[str, Sequence[int]],
    actual: Mapping[str, Sequence[int]],
    *,
    what: str = "tensor",
    todo: str = "",
    kind: type[BadInput] = BadCheckpoint,
) -> None:
    """Refuse what has not the wanted tensors, naming the first that differs."""
    if (difference := first_difference(expected_shapes, actual)) is not None:
        name, *shapes = difference
        expected, actual_shape = (f"no such {what}" if shape is None else [*shape] for shape in shapes)
        raise kind(where, shown(name), expected=expected, found=actual_shape, todo=todo)


Positive = Annotated[int, Field(ge=1)]
#: Start and stop on one dim, and how far the file's rank is from the grid's first.
Stretch = tuple[int, int, int]


class GridCut(StrictRecord):
    """Cut dim ``dim`` into ``count`` pieces of ``rows`` rows, each in the file of another rank.

    If one piece is in the file of rank r, the next piece is in the file of rank r + ``apart``. A piece ends
    where the tensor, or the piece that is being cut, ends: so the last pieces may be shorter, or empty.
    """

    dim: Count
    rows: Positive
    count: Positive
    apart: Positive


class Grid(StrictRecord):
    """State the parts of a whole tensor: the first part is in the file of rank ``first``.

    ``cuts`` are applied in their order, and each cuts all pieces that the earlier cuts made. The first part
    is the piece that starts at index 0 of every dim. Empty pieces are in no file. No element is in two parts,
    because the pieces of a cut never overlap.
    """

    first: Count
    cuts: tuple[GridCut, ...] = ()

    @classmethod
    def of(cls, declaration: Declaration, layout: Layout, pipeline: int) -> Self:
        """Return the grid of a parameter as the ranks of one pipeline rank store it between steps.

        Its parts are the boxes of ``Declaration.shard_box`` without padding, in the files of their owners.
        """
        _, shards, experts = layout.data_sizes(declaration.experts)
        sizes, cuts = [*declaration.held_shape(layout)], list[GridCut]()

        def cut(dim: int, pieces: int, apart: int) -> None:
            if pieces > 1:
                sizes[dim] = -(-sizes[dim] // pieces)
                cuts.append(GridCut(dim=dim, rows=max(1, sizes[dim]), count=pieces, apart=apart))

        if declaration.experts:
            cut(0, experts, layout.tensor)
        if declaration.cut is not None:
            assert declaration.cut.axis == "tensor", declaration
            cut(declaration.cut.dim, layout.tensor, 1)
        if not declaration.buffer and sizes:
            cut(declaration.shard_dim(layout), shards, experts * layout.tensor)
        return cls(first=layout.first_rank(pipeline), cuts=tuple(cuts))

    def parts(self, shape: tuple[int, ...], within: Box | None = None) -> Iterator[tuple[int, Box]]:
        """Yield the rank and the box of each part, or only of the parts that hold elements of ``within``."""
        within = within or Box.whole(shape)
        if within.size:
            bounds = enumerate(zip(shape, within.start, within.stop, strict=True))
            dims = [[*_pieces(self._cuts_of(dim), (0, n, 0), (low, high))] for dim, (n, low, high) in bounds]
            for pieces in product(*dims):
                box = Box(tuple(piece[0] for piece in pieces), tuple(piece[1] for piece in pieces))
                yield self.first + sum(piece[2] for piece in pieces), box

    def number(self, shape: tuple[int, ...]) -> int:
        """Return the number of parts, without making them."""
        return prod(_number(self._cuts_of(dim), size) for dim, size in enumerate(shape)) if all(shape) else 0

    def box_of(self, rank: int, shape: tuple[int, ...]) -> Box | None:
        """Return the part that is in the file of this rank, if there is one."""
        rest, index = rank - self.first, dict[int, int]()
        for number, cut in sorted(enumerate(self.cuts), key=lambda numbered_cut: -numbered_cut[1].apart):
            index[number], rest = divmod(rest, cut.apart)
            if not 0 <= index[number] < cut.count:
                return None
        if rest or not all(shape):
            return None
        start, stop = [0] * len(shape), [*shape]
        for number, cut in enumerate(self.cuts):
            start[cut.dim] += index[number] * cut.rows
            stop[cut.dim] = min(stop[cut.dim], start[cut.dim] + cut.rows)
            if start[cut.dim] >= stop[cut.dim]:
                return None
        return Box(tuple(start), tuple(stop))

    def check(self, where: object, name: str, shape: tuple[int, ...], ranks: Collection[int]) -> None:
        """Refuse a grid that leaves elements out, puts two parts in one file, or needs one beyond ``ranks``.

        The work is bounded by the number of files, whatever the grid says.
        """

        def refuse(expected: str, actual: str) -> BadCheckpoint:
            return BadCheckpoint(where, shown(name), expected=expected, found=actual)

        size = 1
        for cut in sorted(self.cuts, key=lambda cut: cut.apart):
            if cut.dim >= len(shape):
                raise refuse(f"cuts of {list(shape)}", f"one of dim {cut.dim}")
            if cut.apart < size:
                raise refuse("one part in each file", f"ranks {cut.apart} apart for {size} parts between")
            size = cut.apart * cut.count
        for dim, extent in enumerate(shape):
            for cut in self._cuts_of(dim):
                if cut.rows * cut.count < extent:
                    hole = f"dim {dim}, {cut.rows * cut.count:,}:{extent:,} owned by nobody"
                    raise refuse("each element owned exactly once", hole)
                extent = min(extent, cut.rows)
        if (parts := self.number(shape)) > len(ranks):
            raise refuse(f"at most {len(ranks):,} parts, one a file", f"{parts:,}")
        for rank, _ in self.parts(shape):
            if rank not in ranks:
                raise refuse("a file for each part", f"none of rank {rank:,}")

    def _cuts_of(self, dim: int) -> list[GridCut]:
        return [cut for cut in self.cuts if cut.dim == dim]


def _pieces(cuts: Sequence[GridCut], whole: Stretch, within: tuple[int, int]) -> Iterator[Stretch]:
    """Yield the pieces of ``whole`` that have rows between the two bounds ``within``."""
    if not cuts:
        yield whole
        return
    cut, (start, stop, offset), (low, high) = cuts[0], whole, within
    rows = min(stop, high) - start
    for index in range(max(0, (low - start) // cut.rows), min(cut.count, -(-rows // cut.rows))):
        begin = start + index * cut.rows
        piece = begin, min(begin + cut.rows, stop), offset + index * cut.apart
        yield from _pieces(cuts[1:], piece, within)


def _number(cuts: Sequence[GridCut], rows: int) -> int:
    """Return the number of nonempty pieces that the cuts make of ``rows`` rows, which they cover."""
    if not cuts:
        return 1
    whole, rest = divmod(rows, cuts[0].rows)
    return whole * _number(cuts[1:], cuts[0].rows) + (_number(cuts[1:], rest) if rest else 0)


class Part(StrictRecord):
    """Say that the box ``start`` to ``stop`` of a tensor lies under the tensor's name in ``files[file]``.

    If several parts hold the same elements, one of them is the ``owner``. The others are ``replica`` parts,
    which make each file complete by itself.
    """

    file: Count
    start: Bounds
    stop: Bounds
    role: Role = "owner"

    @property
    def box(self) -> Box:
        return Box(self.start, self.stop)


class StoredTensor(StrictRecord):
    """Describe a whole tensor: its dtype by the format's name, shape, and its ``parts`` or their ``grid``.

    Read the parts through ``checkpoint_catalog``, which returns the same for both forms.
    """

    dtype: str
    shape: Bounds
    parts: tuple[Part, ...] = ()
    grid: Grid | None = None

    def check(self, where: object, name: str, files: int, ranks: Collection[int]) -> None:
        """Refuse an unknown dtype, boxes outside the tensor, elements without one owner, and missing files.

        ``files``: the number of files in the manifest. ``ranks``: the ranks of a run that wrote a file.
        """
        if self.dtype not in BITS:
            raise BadCheckpoint(where, shown(name), expected="a dtype", found=shown(self.dtype))
        if self.grid is None:
            self._check_parts(where, name, files)
        elif self.parts:
            raise BadCheckpoint(where, shown(name), expected="parts or a grid", found="both")
        else:
            self.grid.check(where, name, self.shape, ranks)

    def _check_parts(self, where: object, name: str, files: int) -> None:
        files_of_parts = set()
        for part in self.parts:
            if part.file >= files or part.file in files_of_parts:
                expected = f"one part in each file below {files}"
                raise BadCheckpoint(where, shown(name), expected=expected, found=f"file {part.file}")
            files_of_parts.add(part.file)
            bounds = zip(part.start, part.stop, strict=False)
            if len(part.start) != len(part.stop) or any(a > b for a, b in bounds):
                start_and_stop = f"start {list(part.start)}, stop {list(part.stop)}"
                raise BadCheckpoint(where, shown(name), expected="start up to stop", found=start_and_stop)
        owners = [part.box for part in self.parts if part.role == "owner"]
        replicas = [part.box for part in self.parts if part.role == "replica"]
        check_coverage(where, shown(name), self.shape, owners, replicas=replicas)
