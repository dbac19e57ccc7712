"""Find the parts of a checkpoint's tensors: by tensor and box, or by file; and open the files.

Every reader goes through here, so it does not matter whether a manifest lists its parts or states a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from ..parallel_state import BadCheckpoint, BadInput, Box
from ..storage.safe_open import contained
from ..storage.safetensors_reader import TensorFile
from ..storage.strict_json import shown
from .copies import GridParts, Stored, Whole
from .damage import damaged
from .manifest import Manifest


class PartTable:
    """Know where every tensor of a manifest lies. Parts of a grid are computed when they are asked for."""

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = manifest.tensors
        self._numbers = manifest.numbers
        self._ranks = {number: rank for rank, number in self._numbers.items()}

    def catalog(self) -> dict[str, Whole]:
        """Return every tensor with its owners' parts."""
        wholes = {}
        for name, tensor in self._tensors.items():
            if tensor.grid is not None:
                wholes[name] = Whole(
                    tensor.shape, tensor.dtype, GridParts(name, tensor.shape, tensor.grid, self._numbers)
                )
            else:
                owners = (part for part in tensor.parts if part.role == "owner")
                parts = tuple(Stored(part.file, name, part.box) for part in owners)
                wholes[name] = Whole(tensor.shape, tensor.dtype, parts)
        return wholes

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


class CheckpointFiles(Sequence[TensorFile]):
    """Hold the files of a checkpoint, in the manifest's order; each is opened when somebody asks for it.

    Its header is then compared with the manifest, and kept. Safe to use from several threads at once.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory, self._manifest, self._table = directory, manifest, PartTable(manifest)
        self._opened: dict[int, TensorFile] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._manifest.files)

    def __getitem__(self, number: Any) -> Any:  # a ``TensorFile``; nobody asks for a slice
        number = range(len(self))[number]
        with self._lock:
            if number not in self._opened:
                self._opened[number] = self.open(number)
            return self._opened[number]

    def open(self, number: int) -> TensorFile:
        """Open a file, and keep nothing of it: the headers of thousands are gigabytes."""
        path = contained(self._directory, self._manifest.files[number].name, kind=BadCheckpoint)
        try:
            file = TensorFile.open(path, expected=self._manifest.tensors)
        except BadInput as bad:  # what is bad input elsewhere is a damaged checkpoint here
            raise damaged(bad.where, bad.key, expected=bad.expected, found=bad.found, todo=bad.todo) from None
        promised = {name: (dtype, box.shape) for name, (dtype, box) in self._table.in_file(number).items()}
        present = {name: (entry.dtype, entry.shape) for name, entry in file.tensors.items()}
        if present != promised:
            name = min(n for n in promised.keys() | present.keys() if promised.get(n) != present.get(n))
            expected = promised.get(name, "no such tensor")
            raise damaged(path, shown(name), expected=expected, found=present.get(name, "no such tensor"))
        return file
