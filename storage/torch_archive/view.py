"""Describe a tensor inside a file as strided elements, without reading it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ...parallel_state import Box
from ..dtypes import BITS
from ..strides import contiguous


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

    def along(
        self, start: Sequence[int], dims: Sequence[int | None], steps: Sequence[int], shape: tuple[int, ...]
    ) -> View:
        """Return the view whose element (i, j, ...) is element ``start`` + ``steps`` * (i, j, ...) of this.

        Dim d of the result runs along dim ``dims[d]`` of this view, in steps of ``steps[d]``, for
        ``shape[d]`` elements; ``None`` is a dim of size 1 that this view does not have. Dims of this view
        that are not named stay at ``start``.
        """
        first = sum(at * stride for at, stride in zip(start, self.strides, strict=True))
        strides = tuple(
            1 if dim is None else self.strides[dim] * step for dim, step in zip(dims, steps, strict=True)
        )
        return View(self.dtype, shape, self.begin + first * self.itemsize, strides)
