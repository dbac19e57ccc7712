"""Define what a manifest says about one tensor: its parts, listed one by one or stated by a grid."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from ..parallel_state import BadCheckpoint, Box
from ..storage.coverage import check_coverage
from ..storage.dtypes import BITS
from ..storage.records import Count, StrictRecord
from ..storage.strict_json import shown
from .grid import Grid

Bounds = tuple[Count, ...]
Role = Literal["owner", "replica"]


def check_same_shapes(
    where: object,
    wanted: Mapping[str, Sequence[int]],
    actual: Mapping[str, Sequence[int]],
    *,
    what: str = "tensor",
    todo: str = "",
) -> None:
    """Refuse a checkpoint that has not the wanted tensors, naming the first that differs."""
    for name in [*wanted, *actual]:
        if wanted.get(name) != actual.get(name):
            expected, there = (
                f"no such {what}" if shape is None else [*shape]
                for shape in (wanted.get(name), actual.get(name))
            )
            raise BadCheckpoint(where, shown(name), expected=expected, found=there, todo=todo)


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
    """Describe a whole tensor: its dtype by the format's name, its shape, and either its ``parts`` or the
    ``grid`` that they follow.

    Read the parts through ``PartTable``, which returns the same for both forms.
    """

    dtype: str
    shape: Bounds
    parts: tuple[Part, ...] = ()
    grid: Grid | None = None

    def check(self, where: object, name: str, files: int, ranks: Collection[int]) -> None:
        """Refuse an unknown dtype, boxes outside the tensor, elements without exactly one owner, and missing
        files.

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
        seen = set()
        for part in self.parts:
            if part.file >= files or part.file in seen:
                expected = f"one part in each file below {files}"
                raise BadCheckpoint(where, shown(name), expected=expected, found=f"file {part.file}")
            seen.add(part.file)
            bounds = zip(part.start, part.stop, strict=False)
            if len(part.start) != len(part.stop) or any(a > b for a, b in bounds):
                start_and_stop = f"start {list(part.start)}, stop {list(part.stop)}"
                raise BadCheckpoint(where, shown(name), expected="start up to stop", found=start_and_stop)
        replicas = [part.box for part in self.parts if part.role == "replica"]
        owners = [part.box for part in self.parts if part.role == "owner"]
        check_coverage(where, shown(name), self.shape, owners)
        if any(
            len(b.stop) != len(self.shape) or any(s > n for s, n in zip(b.stop, self.shape, strict=True))
            for b in replicas
        ):
            raise BadCheckpoint(where, shown(name), expected=f"replicas inside {list(self.shape)}")
