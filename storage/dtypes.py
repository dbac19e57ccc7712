"""List the element types of safetensors files, and torch's for them; look whether numbers are finite."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..parallel_state import BUFFER_DTYPE

#: The types that torch holds one element at a time; F4 and F6 pack several in a byte and are left out.
TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}

#: Bits of one element of every type that the format knows.
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, **{name: 8 * dtype.itemsize for name, dtype in TORCH.items()}}

#: The types of trained weights; every other one means a quantised checkpoint.
WEIGHTS = ("F16", "BF16", "F32", "F64")

_NAMES = {dtype: name for name, dtype in TORCH.items()}

#: The type of declared buffers, in every file.
BUFFER = _NAMES[BUFFER_DTYPE]


def name_of(dtype: torch.dtype) -> str:
    """Return the format's name of a torch type, ``"BF16"`` for ``torch.bfloat16``."""
    return _NAMES[dtype]


#: For each type: the signed and unsigned integers of its width, and its positive infinity read as one.
_BITS = {
    torch.float16: (np.int16, np.uint16, 0x7C00),
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float32: (np.int32, np.uint32, 0x7F80_0000),
    torch.float64: (np.int64, np.uint64, 0x7FF0_0000_0000_0000),
}


@dataclass(frozen=True, slots=True)
class Look:
    """Tell whether all numbers of a tensor are finite, and whether all are zero."""

    finite: bool
    zero: bool


def look_at(numbers: Tensor) -> Look:
    """Tell whether all of a contiguous CPU tensor is finite, and whether all is zero; integers are finite."""
    if numbers.numel() == 0:
        return Look(True, True)
    if numbers.dtype not in _BITS:
        return Look(True, not bool(numbers.any()))
    signed, unsigned, infinity = _BITS[numbers.dtype]
    raw = numbers.reshape(-1).view(torch.uint8).numpy()
    sign = 1 << numbers.element_size() * 8 - 1
    positive, negative = int(raw.view(signed).max()), int(raw.view(unsigned).max())
    finite = positive < infinity and negative < infinity + sign
    return Look(finite, positive <= 0 and negative in (0, sign))


def smallest(dtype: torch.dtype) -> float:
    """Return the smallest positive number that a floating type holds, a subnormal one.

    If it is larger in the type of a cast than before, the cast makes small numbers zero.
    """
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps
