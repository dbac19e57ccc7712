"""Read MXFP4 tensors of a Hugging Face folder as bf16, a box at a time.

A tensor NAME lies in two: ``NAME_blocks`` (..., rows, G, 16) holds two 4-bit numbers a byte, the lower half
first, and ``NAME_scales`` (..., rows, G) the exponent, plus 127, of the 32 numbers of a group. The model's
tensor is (..., 32 G, rows), as transformers unpacks it.

Source: OCP Microscaling Formats (MX) Specification 1.0, 2023; GPT-OSS's model card (2025), section 2.1.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...parallel_state import BadInput, Box
from ...storage.safetensors_header import Entry
from ...storage.safetensors_reader import TensorFile
from ...storage.whole_file import held_tensors

BLOCKS, SCALES = "_blocks", "_scales"
_GROUP, _BYTES, _BIAS = 32, 16, 127
#: Numbers that are unpacked at once, few beside a block of a conversion.
_AT_ONCE = 1 << 19
_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cpu")
#: The two bf16 numbers of each byte, as 32 bits; the factor of each scale.
_BOTH = torch.cat((_NUMBERS, -_NUMBERS)).to(torch.bfloat16)
_PAIRS = _BOTH[[(byte >> 4 * half) & 15 for byte in range(256) for half in (0, 1)]].view(torch.int32).numpy()
_FACTORS = torch.tensor([2.0 ** (scale - _BIAS) for scale in range(256)], device="cpu").to(torch.bfloat16)


class UnpackedFile(TensorFile):
    """Give the packed tensors of a folder as if one file held them in bf16."""

    def __init__(self, path: Path, packed: Mapping[str, tuple[TensorFile, TensorFile]]) -> None:
        self._packed, tensors = packed, {}
        for name, (blocks, scales) in packed.items():
            *outer, rows, groups, size = _shape(blocks, name + BLOCKS)
            if size != _BYTES or _shape(scales, name + SCALES) != (*outer, rows, groups):
                expected = f"{[*outer, rows, groups]}, one for each {_BYTES} bytes of {name}{BLOCKS}"
                shape_and_size = f"{list(_shape(scales, name + SCALES))} and {size} bytes"
                raise BadInput(scales.path, name + SCALES, expected=expected, found=shape_and_size)
            shape = (*outer, groups * _GROUP, rows)
            tensors[name] = Entry("BF16", shape, 0, 2 * torch.Size(shape).numel())
        super().__init__(path, tensors, {}, 0, None)

    def read(self, name: str, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        """Return the elements of tensor ``name`` in ``box`` (default: all) as bf16; see ``TensorFile``."""
        box = Box.whole(self.tensors[name].shape) if box is None else box
        out = torch.empty(box.shape, dtype=torch.bfloat16) if out is None else out
        (*start, column, row), (*stop, last_column, last_row) = box.start, box.stop
        first, last = column // _GROUP, -(-last_column // _GROUP)
        columns = slice(column - first * _GROUP, last_column - first * _GROUP)
        (blocks, scales), each = self._packed[name], max(1, _AT_ONCE * (last_row - row) // max(1, box.size))
        for begin in range(row, last_row, each) if box.size else ():
            end = min(begin + each, last_row)
            packed_box = Box((*start, begin, first), (*stop, end, last))
            packed = blocks.read(name + BLOCKS, Box((*packed_box.start, 0), (*packed_box.stop, _BYTES)))
            numbers = unpack(packed, scales.read(name + SCALES, packed_box))
            out[..., begin - row : end - row] = numbers[..., columns].transpose(-1, -2)
        return out

    def made_of(self, name: str) -> Sequence[tuple[TensorFile, str]]:
        """Return where the packed numbers and their scales lie."""
        blocks, scales = self._packed[name]
        return (blocks, name + BLOCKS), (scales, name + SCALES)

    def made_from(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return tensor ``name`` as bf16, made of the packed numbers and their scales."""
        blocks, scales = held_tensors(self.made_of(name), parts)
        return UnpackedFile(self.path, {name: (blocks, scales)}).read(name)

    @property
    def stored_in(self) -> Sequence[TensorFile]:
        return [*{id(file): file for both in self._packed.values() for file in both}.values()]

    def state(self) -> tuple[str, object, str]:
        """Return the states of the files that hold the packed tensors."""
        return str(self.path), [file.state() for file in self.stored_in], "mxfp4"


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of packed bytes (..., G, 16) with their scales (..., G): bf16, (..., 32 G)."""
    numbers = torch.from_numpy(_PAIRS.take(blocks.numpy())).view(torch.bfloat16)
    return numbers.mul_(_FACTORS[scales.int()].unsqueeze(-1)).flatten(-2)


def unpacked(tensors: Mapping[str, TensorFile], path: Path) -> dict[str, TensorFile]:
    """Return a folder's tensors with one of bf16 in place of each two that belong together.

    Raises ``BadInput`` for one without the other, and for shapes that do not fit together.
    """
    packed: dict[str, tuple[TensorFile, TensorFile]] = {}
    for key, file in tensors.items():
        name, other = key.removesuffix(BLOCKS), key.removesuffix(BLOCKS) + SCALES
        if key.endswith(BLOCKS):
            if other not in tensors:
                raise BadInput(path, other, expected=f"the scales of {key}", found="no such tensor")
            packed[name] = file, tensors[other]
    made = UnpackedFile(path, packed)
    used = {name + suffix for name in packed for suffix in (BLOCKS, SCALES)}
    others = {name: place for name, place in tensors.items() if name not in used}
    return others | dict.fromkeys(made.tensors, made)


def _shape(file: TensorFile, key: str) -> tuple[int, ...]:
    entry = file.tensors[key]
    if entry.dtype != "U8" or len(entry.shape) < 2 + key.endswith(BLOCKS):
        expected = "bytes (U8) in groups"
        raise BadInput(file.path, key, expected=expected, found=f"{entry.dtype} {list(entry.shape)}")
    return entry.shape
