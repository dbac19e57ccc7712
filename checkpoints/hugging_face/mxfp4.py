"""Read MXFP4 tensors of a Hugging Face folder as bf16, a box at a time.

A tensor NAME lies in two: ``NAME_blocks`` (..., rows, G, 16) holds two 4-bit numbers a byte, the lower half
first, and ``NAME_scales`` (..., rows, G) the exponent, plus 127, of the 32 numbers of a group. The model's
tensor is (..., 32 G, rows), as transformers unpacks it.

Source: OCP Microscaling Formats (MX) Specification 1.0, 2023; GPT-OSS's model card (2025), section 2.1.
"""

import torch
from torch import Tensor

from ...parallel_state import BadInput, Box
from ...storage.safetensors_reader import TensorFile
from .packed import PackedFile, Part

BLOCKS, SCALES = "_blocks", "_scales"
_GROUP, _BYTES, _BIAS = 32, 16, 127
#: Numbers that are unpacked at once, few beside a block of a conversion.
_AT_ONCE = 1 << 19
_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cpu")
#: The two bf16 numbers of each byte, as 32 bits; the factor of each scale.
_BOTH = torch.cat((_NUMBERS, -_NUMBERS)).to(torch.bfloat16)
_PAIRS = _BOTH[[(byte >> 4 * half) & 15 for byte in range(256) for half in (0, 1)]].view(torch.int32).numpy()
_FACTORS = torch.tensor([2.0 ** (scale - _BIAS) for scale in range(256)], device="cpu").to(torch.bfloat16)


class UnpackedFile(PackedFile):
    """Give the packed tensors of a folder as if one file held them in bf16."""

    suffixes, mark, other = (BLOCKS, SCALES), BLOCKS, "scales"

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, whose scales must fit its blocks."""
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
        each = max(1, _AT_ONCE * (last_row - row) // box.size)
        for begin in range(row, last_row, each):
            end = min(begin + each, last_row)
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
