"""List the element types that a safetensors file can name, and torch's dtypes for them."""

from __future__ import annotations

import torch

from ..parallel_state import BUFFER_DTYPE

#: Bits of one element of every type that the format knows.
BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

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

#: The types of trained weights; every other one means a quantised checkpoint.
WEIGHTS = ("F16", "BF16", "F32", "F64")

_NAMES = {dtype: name for name, dtype in TORCH.items()}

#: The type of declared buffers, in every file.
BUFFER = _NAMES[BUFFER_DTYPE]


def name_of(dtype: torch.dtype) -> str:
    """Return the format's name of a torch type, ``"BF16"`` for ``torch.bfloat16``."""
    return _NAMES[dtype]
