"""Read FP8 matrices of a Hugging Face folder as bf16, a box at a time.

A matrix NAME (rows, columns) in FP8 lies beside ``NAME_scale_inv``, which has one fp32 factor for each block
of ``weight_block_size`` numbers, such as 128 by 128; the last block of a row or column may be cut short.
Source: DeepSeek-V3 (2024), section 3.3.2, and its ``inference/fp8_cast_bf16.py``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...parallel_state import BadInput, Box
from ...storage.safetensors_header import Entry
from ...storage.safetensors_reader import TensorFile
from ...storage.whole_file import held_tensors

SCALES = "_scale_inv"
#: Numbers that are multiplied at once: their fp32 forms are small beside a block of a conversion.
_AT_ONCE = 1 << 17


class ScaledFile(TensorFile):
    """Give the FP8 matrices of a folder, by their names, as if one file held them in bf16."""

    def __init__(
        self, path: Path, scaled: Mapping[str, tuple[TensorFile, TensorFile]], block: tuple[int, int]
    ) -> None:
        self._scaled, self._block, end = scaled, block, 0
        tensors: dict[str, Entry] = {}
        for name, (numbers, scales) in scaled.items():
            entry, factors = numbers.tensors[name], scales.tensors[name + SCALES]
            if entry.dtype != "F8_E4M3" or len(entry.shape) != 2:
                type_and_shape = f"{entry.dtype} {list(entry.shape)}"
                raise BadInput(numbers.path, name, expected="a matrix of F8_E4M3", found=type_and_shape)
            expected = tuple(-(-size // each) for size, each in zip(entry.shape, block, strict=True))
            if (factors.dtype, factors.shape) != ("F32", expected):
                type_and_shape = f"{factors.dtype} {list(factors.shape)}"
                raise BadInput(
                    scales.path, name + SCALES, expected=f"F32 {list(expected)}", found=type_and_shape
                )
            begin, end = end, end + 2 * torch.Size(entry.shape).numel()
            tensors[name] = Entry("BF16", entry.shape, begin, end)
        super().__init__(path, tensors, {}, 0, None)

    def read(self, name: str, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        """Return the elements of matrix ``name`` in ``box`` (default: all) as bf16; see ``TensorFile``."""
        box = Box.whole(self.tensors[name].shape) if box is None else box
        out = torch.empty(box.shape, dtype=torch.bfloat16) if out is None else out
        (row, column), (last_row, last_column) = box.start, box.stop
        (numbers, scales), (high, wide) = self._scaled[name], self._block
        each = max(1, _AT_ONCE // max(1, last_column - column))
        for begin in range(row, last_row, each) if box.size else ():
            end = min(begin + each, last_row)
            scale_box = Box((begin // high, column // wide), (-(-end // high), -(-last_column // wide)))
            factors = scales.read(name + SCALES, scale_box)
            rows = torch.arange(begin, end) // high - scale_box.start[0]
            columns = torch.arange(column, last_column) // wide - scale_box.start[1]
            piece = numbers.read(name, Box((begin, column), (end, last_column))).float()
            out[begin - row : end - row] = piece * factors[rows][:, columns]
        return out

    def made_of(self, name: str) -> Sequence[tuple[TensorFile, str]]:
        """Return where the matrix in FP8 and its factors lie."""
        numbers, scales = self._scaled[name]
        return (numbers, name), (scales, name + SCALES)

    def made_from(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return matrix ``name`` as bf16, made of the matrix in FP8 and its factors."""
        numbers, scales = held_tensors(self.made_of(name), parts)
        return ScaledFile(self.path, {name: (numbers, scales)}, self._block).read(name)

    @property
    def stored_in(self) -> Sequence[TensorFile]:
        return [*{id(file): file for both in self._scaled.values() for file in both}.values()]

    def state(self) -> tuple[str, object, str]:
        """Return the states of the files that hold the matrices and their factors."""
        return str(self.path), [file.state() for file in self.stored_in], "fp8"


def block_size(packing: Mapping[str, object]) -> tuple[int, int] | None:
    """Return the block that a ``quantization_config`` of FP8 states; ``None`` for any other."""
    block = packing.get("weight_block_size")
    if packing.get("quant_method") != "fp8" or not isinstance(block, list) or len(block) != 2:
        return None
    high, wide = block
    whole = type(high) is int and type(wide) is int and high > 0 and wide > 0
    return (high, wide) if whole else None


def scaled(tensors: Mapping[str, TensorFile], path: Path, block: tuple[int, int]) -> dict[str, TensorFile]:
    """Return a folder's tensors with one of bf16 in place of each matrix and its factors.

    Raises ``BadInput`` for factors without a matrix, and for shapes that do not fit together.
    """
    pairs: dict[str, tuple[TensorFile, TensorFile]] = {}
    for key, file in tensors.items():
        name = key.removesuffix(SCALES)
        if name != key:
            if name not in tensors:
                raise BadInput(path, name, expected=f"the matrix of {key}", found="no such tensor")
            pairs[name] = tensors[name], file
    made = ScaledFile(path, pairs, block)
    unscaled = {key: place for key, place in tensors.items() if key.removesuffix(SCALES) not in pairs}
    return unscaled | dict.fromkeys(made.tensors, made)
