"""Find the parts of a checkpoint's tensors: by tensor and box, or by file; and open the files.

Every reader goes through here, so it does not matter whether a manifest lists its parts or states a grid.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from ..parallel_state import BadCheckpoint, BadInput, Box, Piece
from ..storage.catalog import Catalog, Key, LazyTensor
from ..storage.safe_open import contained
from ..storage.safetensors_reader import TensorFile
from ..storage.strict_json import shown
from .find import damaged
from .manifest import Manifest
from .stored_tensor import Grid, first_difference


@dataclass(frozen=True, slots=True)
class GridParts:
    """Hold the parts of tensor ``key`` that a grid states (see ``Grid``), each computed when it is asked for.

    ``files``: the file of each rank.
    """

    key: str
    shape: tuple[int, ...]
    grid: Grid
    files: Mapping[int, TensorFile]

    def __len__(self) -> int:
        return self.grid.number(self.shape)

    def near(self, box: Box) -> Iterator[Piece[Key]]:
        """Yield the parts that hold elements of ``box``."""
        for rank, part in self.grid.parts(self.shape, box):
            yield Piece.plain(part, Key(self.files[rank], self.key))


class PartTable:
    """Know where every tensor of a manifest lies. Parts of a grid are computed when they are asked for."""

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = manifest.tensors
        self._numbers = manifest.numbers
        self._ranks = {number: rank for rank, number in self._numbers.items()}

    def catalog(self, files: Sequence[TensorFile]) -> Catalog:
        """Return every tensor with its owners' parts, which are in ``files``."""
        catalog, by_rank = Catalog(), {rank: files[number] for rank, number in self._numbers.items()}
        for name, tensor in self._tensors.items():
            owners = (part for part in tensor.parts if part.role == "owner")
            parts = (
                tuple(Piece.plain(part.box, Key(files[part.file], name)) for part in owners)
                if tensor.grid is None
                else GridParts(name, tensor.shape, tensor.grid, by_rank)
            )
            catalog[name] = LazyTensor(name, tensor.dtype, tensor.shape, parts)
        return catalog

    def in_file(self, number: int) -> dict[str, tuple[str, Box]]:
        """Return the dtype and the box of each tensor that has a part, or a replica of one, in this file."""
        tensors = {
            name: (self._tensors[name].dtype, box) for name, box in self._listed.get(number, {}).items()
        }
        if (rank := self._ranks.get(number)) is not None:
            for name, tensor in self._tensors.items():
                if tensor.grid is not None and (box := tensor.grid.box_of(rank, tensor.shape)) is not None:
                    tensors[name] = tensor.dtype, box
        return tensors

    @cached_property
    def _listed(self) -> dict[int, dict[str, Box]]:
        table: dict[int, dict[str, Box]] = {}
        for name, tensor in self._tensors.items():
            for part in tensor.parts:
                table.setdefault(part.file, {})[name] = part.box
        return table


class CheckpointFile(TensorFile):
    """Read a file of a checkpoint, which is opened when somebody asks what is in it.

    Its header is then compared with the manifest, and kept. Safe to use from several threads at once.
    """

    def __init__(self, directory: Path, manifest: Manifest, table: PartTable, number: int) -> None:
        self.path = directory / manifest.files[number].name
        self._manifest, self._table, self._number, self._lock = manifest, table, number, Lock()

    def __getattr__(self, name: str) -> Any:
        """Open the file for one of those attributes that opening sets."""
        if name not in ("tensors", "metadata", "data_begin", "identity"):
            raise AttributeError(name)
        with self._lock:
            if name not in self.__dict__:
                self.__dict__.update(vars(self.open_anew()))
        return self.__dict__[name]

    def open_anew(self) -> TensorFile:
        """Open the file, and keep nothing of it: the headers of thousands are gigabytes."""
        path = contained(self.path.parent, self.path.name, kind=BadCheckpoint)
        try:
            file = TensorFile.open(path, expected=self._manifest.tensors)
        except BadInput as bad:  # what is bad input elsewhere is a damaged checkpoint here
            raise damaged(bad.where, bad.key, expected=bad.expected, found=bad.found, todo=bad.todo) from None
        promised = {n: (dtype, box.shape) for n, (dtype, box) in self._table.in_file(self._number).items()}
        present = {n: (entry.dtype, entry.shape) for n, entry in file.tensors.items()}
        if (difference := first_difference(promised, present)) is not None:
            name, *both = difference
            expected, actual = ("no such tensor" if each is None else each for each in both)
            raise damaged(path, shown(name), expected=expected, found=actual)
        return file


def checkpoint_files(directory: Path, manifest: Manifest) -> list[CheckpointFile]:
    """Return the files of a checkpoint, in the manifest's order; none is opened."""
    table = PartTable(manifest)
    return [CheckpointFile(directory, manifest, table, number) for number in range(len(manifest.files))]
