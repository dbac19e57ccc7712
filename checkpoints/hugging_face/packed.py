"""Read tensors that lie packed in two others, numbers and their scales, as bf16, a box at a time.

FP8: a matrix NAME (rows, columns) lies beside ``NAME_scale_inv``, which has one fp32 factor for each block of
``weight_block_size`` numbers, such as 128 by 128; the last block of a row or column may be cut short. Source:
DeepSeek-V3 (2024), section 3.3.2, and its ``inference/fp8_cast_bf16.py``.

MXFP4: ``NAME_blocks`` (..., rows, G, 16) holds two 4-bit numbers a byte, the lower half first, and
``NAME_scales`` (..., rows, G) the exponent, plus 127, of the 32 numbers of a group. The model's tensor is
(..., 32 G, rows), as transformers unpacks it. Source: OCP Microscaling Formats (MX) Specification 1.0, 2023;
GPT-OSS's model card (2025), section 2.1.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from ...parallel_state import BadInput, Box, require
from ...storage.safetensors_reader import TensorFile
from ...storage.strides import View

#: Returns the part of a stored tensor in a box.
Part = Callable[[Box], Tensor]
FACTORS, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
#: Numbers of FP8 that are multiplied at once: their fp32 forms are small beside a block of a conversion.
_MULTIPLIED = 1 << 17
#: The types of these factors: DeepSeek's, and those of Qwen's files.
_FACTORS_IN = ("F32", "BF16")
_GROUP, _BYTES, _BIAS = 32, 16, 127
#: Numbers that are unpacked at once, few beside a block of a conversion.
_UNPACKED = 1 << 19
_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cpu")
#: The two bf16 numbers of each byte, as 32 bits; the factor of each scale.
_BOTH = torch.cat((_NUMBERS, -_NUMBERS)).to(torch.bfloat16)
_PAIRS = _BOTH[[(byte >> 4 * half) & 15 for byte in range(256) for half in (0, 1)]].view(torch.int32).numpy()
_FACTORS = torch.tensor([2.0 ** (scale - _BIAS) for scale in range(256)], device="cpu").to(torch.bfloat16)


class PackedFile(TensorFile):
    """Read tensor NAME a box at a time from two others of a folder, whose names end in ``suffixes``.

    ``tensors``: the folder's; their names with ``mark``, one of the two, tell which are packed. ``BadInput``
    for one without the other.
    """

    suffixes: ClassVar[tuple[str, str]]
    mark: ClassVar[str]
    #: What the user is told of the other tensor if it is missing.
    other: ClassVar[str]

    def __init__(self, path: Path, tensors: Mapping[str, TensorFile]) -> None:
        self._packed: dict[str, tuple[TensorFile, TensorFile]] = {}
        for key in tensors:
            if key.endswith(self.mark):
                first, second = (key.removesuffix(self.mark) + suffix for suffix in self.suffixes)
                for name in (first, second):
                    expected = f"the {self.other} of {key}"
                    require(name in tensors, path, name, expected, "no such tensor")
                self._packed[key.removesuffix(self.mark)] = tensors[first], tensors[second]
        views = {name: View.row_major("BF16", self.shape_of(name), 0) for name in self._packed}
        super().__init__(path, views, 0, 0, None)

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
        stored = zip(self._packed[name], self.suffixes, strict=True)
        numbers, scales = (partial(file.read, name + suffix) for file, suffix in stored)
        box = Box.whole(self.tensors[name].shape) if box is None else box
        out = torch.empty(box.shape, dtype=torch.bfloat16) if out is None else out
        if box.size:
            self.unpack(numbers, scales, box, out)
        return out

    @cached_property  # every read ahead asks for it
    def stored_in(self) -> Sequence[TensorFile]:
        return [*dict.fromkeys(file for both in self._packed.values() for file in both)]

    def state(self) -> tuple[str, object, str]:
        return str(self.path), [file.state() for file in self.stored_in], type(self).__name__


class ScaledFile(PackedFile):
    """Give the FP8 matrices of a folder, by their names, as if one file held them in bf16."""

    suffixes, mark, other = ("", FACTORS), FACTORS, "matrix"

    def __init__(self, path: Path, tensors: Mapping[str, TensorFile], block: tuple[int, int]) -> None:
        self.block = block
        super().__init__(path, tensors)

    def shape_of(self, name: str) -> tuple[int, ...]:
        numbers, scales = self._packed[name]
        entry, factors = numbers.tensors[name], scales.tensors[name + FACTORS]
        if entry.dtype != "F8_E4M3" or len(entry.shape) != 2:
            type_and_shape = f"{entry.dtype} {list(entry.shape)}"
            raise BadInput(numbers.path, name, expected="a matrix of F8_E4M3", found=type_and_shape)
        expected = tuple(-(-size // width) for size, width in zip(entry.shape, self.block, strict=True))
        if factors.dtype not in _FACTORS_IN or factors.shape != expected:
            types_and_shape = f"{' or '.join(_FACTORS_IN)} {list(expected)}"
            type_and_shape = f"{factors.dtype} {list(factors.shape)}"
            raise BadInput(scales.path, name + FACTORS, expected=types_and_shape, found=type_and_shape)
        return entry.shape

    def unpack(self, numbers: Part, scales: Part, box: Box, out: Tensor) -> None:
        """Multiply each block by its factor."""
        (row, column), (last_row, last_column), (high, wide) = box.start, box.stop, self.block
        columns = torch.arange(column, last_column) // wide - column // wide
        rows_at_once = max(1, _MULTIPLIED // (last_column - column))
        for begin in range(row, last_row, rows_at_once):
            end = min(begin + rows_at_once, last_row)
            factors = scales(Box((begin // high, column // wide), (-(-end // high), -(-last_column // wide))))
            rows = torch.arange(begin, end) // high - begin // high
            piece = numbers(Box((begin, column), (end, last_column))).float()
            out[begin - row : end - row] = piece * factors[rows][:, columns]


def block_size(packing: Mapping[str, object]) -> tuple[int, int] | None:
    """Return the block that a ``quantization_config`` of FP8 states; ``None`` for any other."""
    block = packing.get("weight_block_size")
    if packing.get("quant_method") != "fp8" or not isinstance(block, list) or len(block) != 2:
        return None
    high, wide = block
    return (high, wide) if all(type(size) is int and size > 0 for size in block) else None


class UnpackedFile(PackedFile):
    """Give the packed tensors of a folder as if one file held them in bf16."""

    suffixes, mark, other = (BLOCKS, SCALES), BLOCKS, "scales"

    def shape_of(self, name: str) -> tuple[int, ...]:
        blocks, scales = self._packed[name]
        *outer, rows, groups, size = _shape(blocks, name + BLOCKS)
        if size != _BYTES or _shape(scales, name + SCALES) != (*outer, rows, groups):
            expected = f"{[*outer, rows, groups]}, one for each {_BYTES} bytes of {name}{BLOCKS}"
            shape_and_size = f"{list(_shape(scales, name + SCALES))} and {size} bytes"
            raise BadInput(scales.path, name + SCALES, expected=expected, found=shape_and_size)
        return (*outer, groups * _GROUP, rows)

    def unpack(self, numbers: Part, scales: Part, box: Box, out: Tensor) -> None:
        """Unpack the groups that the box touches, some rows at a time."""
        (*start, column, row), (*stop, last_column, last_row) = box.start, box.stop
        first, last = column // _GROUP, -(-last_column // _GROUP)
        columns = slice(column - first * _GROUP, last_column - first * _GROUP)
        rows_at_once = max(1, _UNPACKED * (last_row - row) // box.size)
        for begin in range(row, last_row, rows_at_once):
            end = min(begin + rows_at_once, last_row)
            groups = Box((*start, begin, first), (*stop, end, last))
            packed = numbers(Box((*groups.start, 0), (*groups.stop, _BYTES)))
            unpacked = unpack(packed, scales(groups))
            out[..., begin - row : end - row] = unpacked[..., columns].transpose(-1, -2)


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of packed bytes (..., G, 16) with their scales (..., G): bf16, (..., 32 G)."""
    numbers = torch.from_numpy(_PAIRS.take(blocks.numpy())).view(torch.bfloat16)
    return numbers.mul_(_FACTORS[scales.int()].unsqueeze(-1)).flatten(-2)


def _shape(file: TensorFile, key: str) -> tuple[int, ...]:
    entry = file.tensors[key]
    if entry.dtype != "U8" or len(entry.shape) < 2 + key.endswith(BLOCKS):
        expected = "bytes (U8) in groups"
        raise BadInput(file.path, key, expected=expected, found=f"{entry.dtype} {list(entry.shape)}")
    return entry.shape
