"""Read FP8 matrices of a Hugging Face folder as bf16, a box at a time.

A matrix NAME (rows, columns) in FP8 lies beside ``NAME_scale_inv``, which has one fp32 factor for each block
of ``weight_block_size`` numbers, such as 128 by 128; the last block of a row or column may be cut short.
Source: DeepSeek-V3 (2024), section 3.3.2, and its ``inference/fp8_cast_bf16.py``.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...parallel_state import BadInput, Box
from ...storage.safetensors_reader import TensorFile
from .packed import PackedFile, Part

SCALES = "_scale_inv"
#: Numbers that are multiplied at once: their fp32 forms are small beside a block of a conversion.
_AT_ONCE = 1 << 17


class ScaledFile(PackedFile):
    """Give the FP8 matrices of a folder, by their names, as if one file held them in bf16."""

    suffixes, mark, other = ("", SCALES), SCALES, "matrix"

    def __init__(
        self, path: Path, packed: Mapping[str, tuple[TensorFile, TensorFile]], block: tuple[int, int]
    ) -> None:
        self.block = block
        super().__init__(path, packed)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a matrix, which its factors must fit."""
        numbers, scales = self._packed[name]
        entry, factors = numbers.tensors[name], scales.tensors[name + SCALES]
        if entry.dtype != "F8_E4M3" or len(entry.shape) != 2:
            type_and_shape = f"{entry.dtype} {list(entry.shape)}"
            raise BadInput(numbers.path, name, expected="a matrix of F8_E4M3", found=type_and_shape)
        expected = tuple(-(-size // each) for size, each in zip(entry.shape, self.block, strict=True))
        if (factors.dtype, factors.shape) != ("F32", expected):
            type_and_shape = f"{factors.dtype} {list(factors.shape)}"
            raise BadInput(scales.path, name + SCALES, expected=f"F32 {list(expected)}", found=type_and_shape)
        return entry.shape

    def unpack(self, numbers: Part, scales: Part, box: Box, out: Tensor) -> None:
        """Multiply each block by its factor."""
        (row, column), (last_row, last_column), (high, wide) = box.start, box.stop, self.block
        columns = torch.arange(column, last_column) // wide - column // wide
        each = max(1, _AT_ONCE // (last_column - column))
        for begin in range(row, last_row, each):
            end = min(begin + each, last_row)
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
