"""Check that numbers are finite, as fast as they can be read: two integer maxima, no mask of booleans.

An IEEE number is not finite when all bits of its exponent are set. Read as integers, such positive numbers
are the largest signed integers, and such negative numbers are the largest unsigned ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
    """Return the smallest positive number that a floating type holds, a subnormal one; 0 for other types.

    If it is larger in the type of a cast than before, the cast makes small numbers zero.
    """
    if not dtype.is_floating_point:
        return 0.0
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps
