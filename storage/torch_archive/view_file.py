"""Read strided views of one file, a box at a time, as tensors of a safetensors file are read."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import NoReturn

from ...parallel_state import BadInput, Box
from ..dtypes import BITS
from ..safe_open import open_regular
from ..safetensors_header import Entry
from ..safetensors_reader import TensorFile, identity_of
from ..strides import contiguous
from .zip_entries import ZipEntry

#: Elements that are read at once where the order of dims changes, few beside a block of a conversion.
_AT_ONCE = 1 << 18


_BEGIN = attrgetter("begin")


class ViewFile(TensorFile):
    """Give views of a file as its tensors; ``add`` makes one more.

    A view lies in one of the stretches whose CRC-32 the file states itself, or in none of a file without any.
    ``sums`` are those of them that hold views.
    """

    def __init__(self, path: Path, size: int, identity: object) -> None:
        super().__init__(path, {}, {}, 0, identity)
        self.views: dict[str, View] = {}
        self._size = size
        self._stretches: list[ZipEntry] = []  # in order

    @classmethod
    def of(cls, path: Path) -> ViewFile:
        """Open ``path`` as a file without views."""
        with open_regular(path) as (_, status):
            return cls(path, status.st_size, identity_of(status))

    def know(self, stretch: ZipEntry) -> None:
        """Take a part of the file whose CRC-32 is known, once."""
        if self._stretch(stretch.begin) != stretch:
            insort(self._stretches, stretch, key=_BEGIN)

    def add(self, view: View, key: str | None = None) -> str:
        """Add a view; return the key under which ``read`` gives it.

        ``BadInput`` for one that leaves the file or its stretch, or whose elements share bytes.
        """
        key = str(len(self.views)) if key is None else key
        assert key not in self.views, key
        end = self._size
        if self._stretches:
            stretch = self._stretch(view.begin)
            end = -1 if stretch is None else stretch.end
        if not 0 <= view.begin <= view.stop <= end:
            actual = f"bytes {view.begin:,} to {view.stop:,}"
            raise BadInput(self.path, key, expected=f"bytes before {end:,}", found=actual)
        if not view.nested:
            actual = f"shape {[*view.shape]} with strides {[*view.strides]}"
            todo = "Save tensor.contiguous() in its place"
            raise BadInput(self.path, key, expected="elements of their own", found=actual, todo=todo)
        self.views[key] = view
        nbytes = Box.whole(view.shape).size * view.itemsize
        self.tensors[key] = Entry(view.dtype, view.shape, view.begin, view.begin + nbytes)
        return key

    def keep(self, keys: Collection[str]) -> None:
        """Forget all other views, and the stretches that only they lie in."""
        self.views = {key: view for key, view in self.views.items() if key in keys}
        self.tensors = {key: entry for key, entry in self.tensors.items() if key in keys}

    def sum_of(self, key: str) -> int | None:
        """Return the CRC-32 that the file states for exactly the bytes of a view, or ``None``."""
        view, stretch = self.views[key], self._stretch(self.views[key].begin)
        exact = stretch is not None and (stretch.begin, stretch.end) == (view.begin, view.stop)
        return stretch.crc if stretch is not None and exact else None

    def _stretch(self, begin: int) -> ZipEntry | None:
        """Return the last stretch that begins up to there."""
        number = bisect_right(self._stretches, begin, key=_BEGIN)
        return self._stretches[number - 1] if number else None

    @property
    def size(self) -> int:
        """Return the number of bytes of the whole file."""
        return self._size

    @property
    def sums(self) -> Sequence[tuple[int, int, int]]:
        """Return begin, end and CRC-32 of each stretch that holds a view, in order."""
        used = {stretch for view in self.views.values() if (stretch := self._stretch(view.begin)) is not None}
        return sorted((stretch.begin, stretch.end, stretch.crc) for stretch in used)

    def extent(self, name: str) -> tuple[int, int]:
        """Return the first byte of the view, and the one after its last; views may share some."""
        return self.views[name].begin, self.views[name].stop

    def strides(self, name: str) -> tuple[int, ...]:
        """Return the view's own strides."""
        return self.views[name].strides


@dataclass(frozen=True, slots=True)
class View:
    """Describe a tensor in a file: its dtype by safetensors' name, its shape, and where its elements lie.

    ``begin``: the byte of the element at index 0. ``strides``: how many elements further the next one lies,
    along each dim.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    strides: tuple[int, ...]

    def __setstate__(self, state: object) -> NoReturn:  # a pickle would move a view that was checked
        raise ValueError("a state for a tensor")

    @classmethod
    def row_major(cls, dtype: str, shape: tuple[int, ...], begin: int) -> View:
        """Return the view of a tensor that lies in one piece from byte ``begin`` on."""
        return cls(dtype, shape, begin, contiguous(shape))

    @property
    def itemsize(self) -> int:
        """Return the bytes of one element."""
        return BITS[self.dtype] // 8

    @property
    def stop(self) -> int:
        """Return the byte after the last one that belongs to the view."""
        if not prod(self.shape):
            return self.begin
        steps = zip(self.shape, self.strides, strict=True)
        return self.begin + (sum((count - 1) * stride for count, stride in steps) + 1) * self.itemsize

    @property
    def nested(self) -> bool:
        """Return whether no two elements share bytes, and the view is as simple as slices, steps and
        permutations of a row-major tensor make it.
        """
        inside = 1
        steps = [(stride, n) for n, stride in zip(self.shape, self.strides, strict=True) if n > 1]
        for stride, count in sorted(steps):
            if stride < inside:
                return False
            inside = stride * count
        return True

    def narrow(self, box: Box) -> View:
        """Return the part of the view in ``box``."""
        first = sum(start * stride for start, stride in zip(box.start, self.strides, strict=True))
        return replace(self, shape=box.shape, begin=self.begin + first * self.itemsize)
