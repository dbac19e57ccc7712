"""Find torch's data types by the names that recipes and commands use."""

import torch

from ..system import literal
from ..system.errors import BadInput

_NAMES = ("float64", "float32", "bfloat16", "float16")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
#: What else is typed for one of them, or for float8.
SPELLINGS = {
    **{"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"},
    **{f"torch.{name}": name for name in DTYPES},
}


def dtype_name(name: str) -> str:
    """Return the name of a data type as recipes have it: ``bfloat16`` for ``bf16``."""
    return SPELLINGS.get(name, name)


def dtype_named(name: str, where: str = "recipe", key: str = "dtype") -> torch.dtype:
    """Return the torch dtype with this name or spelling; raise ``BadInput`` if there is none."""
    dtype = DTYPES.get(dtype_name(name))
    if dtype is None:
        raise BadInput(where, key, expected=f"one of {', '.join(DTYPES)}", found=literal(name))
    return dtype
