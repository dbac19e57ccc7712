"""Read strided views of one file, a box at a time, as tensors of a safetensors file are read."""

from bisect import bisect_right, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from ...parallel_state import BadInput
from ..safe_open import open_regular
from ..safetensors_reader import TensorFile, identity_of
from ..strides import View

_BEGIN = attrgetter("begin")


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """Describe an entry of an archive: where its bytes begin and end in the file, and their CRC-32."""

    begin: int
    end: int
    crc: int


class ViewFile(TensorFile):
    """Give views of a file as its tensors; ``add`` makes one more.

    A view lies in one of the stretches whose CRC-32 the file states itself.
    ``sums`` are those of them that hold views.
    """

    def __init__(self, path: Path) -> None:
        with open_regular(path) as (_, status):
            super().__init__(path, {}, 0, status.st_size, identity_of(status))
        self._stretches: list[ZipEntry] = []  # in order

    def know(self, stretch: ZipEntry) -> None:
        """Take a part of the file whose CRC-32 is known, once."""
        if self._stretch(stretch.begin) != stretch:
            insort(self._stretches, stretch, key=_BEGIN)

    def add(self, view: View, key: str | None = None) -> str:
        """Add a view; return the key under which ``read`` gives it.

        ``BadInput`` for one that leaves its stretch, or whose elements share bytes.
        """
        key = str(len(self.tensors)) if key is None else key
        assert key not in self.tensors, key
        stretch = self._stretch(view.begin)
        if stretch is None or view.end > stretch.end:
            actual = f"bytes {view.begin:,} to {view.end:,}"
            raise BadInput(self.path, key, expected="bytes of one storage", found=actual)
        if not view.nested:
            actual = f"shape {[*view.shape]} with strides {[*view.strides]}"
            todo = "Save tensor.contiguous() in its place"
            raise BadInput(self.path, key, expected="elements of their own", found=actual, todo=todo)
        self.tensors[key] = view
        return key

    def keep(self, keys: Collection[str]) -> None:
        """Forget all other views, and the stretches that only they lie in."""
        self.tensors = {key: view for key, view in self.tensors.items() if key in keys}

    def sum_of(self, key: str) -> int | None:
        """Return the CRC-32 that the file states for exactly the bytes of a view, or ``None``."""
        view, stretch = self.tensors[key], self._stretch(self.tensors[key].begin)
        exact = stretch is not None and (stretch.begin, stretch.end) == (view.begin, view.end)
        return stretch.crc if stretch is not None and exact else None

    def _stretch(self, begin: int) -> ZipEntry | None:
        """Return the last stretch that begins up to there."""
        number = bisect_right(self._stretches, begin, key=_BEGIN)
        return self._stretches[number - 1] if number else None

    @property
    def sums(self) -> Sequence[tuple[int, int, int]]:
        """Return begin, end and CRC-32 of each stretch that holds a view, in order."""
        used = {stretch for view in self.tensors.values() if (stretch := self._stretch(view.begin))}
        return sorted((stretch.begin, stretch.end, stretch.crc) for stretch in used)
