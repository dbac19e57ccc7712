"""Give tensors that lie packed in two others, numbers and their scales, as if a file held them in bf16."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ...parallel_state import BadInput, Box
from ...storage.safetensors_header import Entry
from ...storage.safetensors_reader import TensorFile

#: Returns the part of a stored tensor in a box.
Part = Callable[[Box], Tensor]


class PackedFile(TensorFile):
    """Read tensor NAME a box at a time from two others of the folder, whose names end in ``suffixes``.

    A folder's names with ``mark``, one of the two, tell which tensors are packed.
    """

    suffixes: ClassVar[tuple[str, str]]
    mark: ClassVar[str]
    #: What the user is told of the other tensor if it is missing.
    other: ClassVar[str]

    def __init__(self, path: Path, packed: Mapping[str, tuple[TensorFile, TensorFile]]) -> None:
        self._packed = packed
        tensors = {}
        for name in packed:
            shape = self.shape_of(name)
            tensors[name] = Entry("BF16", shape, 0, 2 * torch.Size(shape).numel())
        super().__init__(path, tensors, {}, 0, None)

    @classmethod
    def pairs(cls, tensors: Mapping[str, TensorFile], path: Path) -> dict[str, tuple[TensorFile, TensorFile]]:
        """Return the two files of each packed tensor among a folder's; ``BadInput`` for one without other."""
        packed = {}
        for key in tensors:
            if key.endswith(cls.mark):
                first, second = (key.removesuffix(cls.mark) + suffix for suffix in cls.suffixes)
                for name in (first, second):
                    if name not in tensors:
                        expected = f"the {cls.other} of {key}"
                        raise BadInput(path, name, expected=expected, found="no such tensor")
                packed[key.removesuffix(cls.mark)] = tensors[first], tensors[second]
        return packed

    def among(self, tensors: Mapping[str, TensorFile]) -> dict[str, TensorFile]:
        """Return a folder's tensors with one of bf16 in place of each two that belong together."""
        used = {name + suffix for name in self._packed for suffix in self.suffixes}
        others = {key: file for key, file in tensors.items() if key not in used}
        return others | dict.fromkeys(self.tensors, self)

    @abstractmethod
    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; ``BadInput`` if the two do not fit together."""

    @abstractmethod
    def unpack(self, numbers: Part, scales: Part, box: Box, out: Tensor) -> None:
        """Fill ``out`` with the elements in ``box``, which is not empty, of a tensor of these two."""

    def read(self, name: str, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        """Return the elements of tensor ``name`` in ``box`` (default: all) as bf16; see ``TensorFile``."""
        numbers, scales = (partial(file.read, key) for file, key in self.made_of(name))
        return self._made(name, numbers, scales, box, out)

    def made_of(self, name: str) -> Sequence[tuple[TensorFile, str]]:
        """Return where the packed numbers and their scales lie."""
        return [(file, name + suffix) for file, suffix in zip(self._packed[name], self.suffixes, strict=True)]

    def made_from(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return tensor ``name`` as bf16, made of the packed numbers and their scales."""
        numbers, scales = parts
        return self._made(name, lambda box: numbers[box.slices], lambda box: scales[box.slices])

    def _made(
        self, name: str, numbers: Part, scales: Part, box: Box | None = None, out: Tensor | None = None
    ) -> Tensor:
        box = Box.whole(self.tensors[name].shape) if box is None else box
        out = torch.empty(box.shape, dtype=torch.bfloat16) if out is None else out
        if box.size:
            self.unpack(numbers, scales, box, out)
        return out

    @property
    def stored_in(self) -> Sequence[TensorFile]:
        return [*{id(file): file for both in self._packed.values() for file in both}.values()]

    def state(self) -> tuple[str, object, str]:
        """Return the states of the files that hold the two."""
        return str(self.path), [file.state() for file in self.stored_in], type(self).__name__
