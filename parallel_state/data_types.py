"""Find torch's data types by the names that recipes and commands use."""

import torch

from .errors import BadInput

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_named(name: str, where: str = "recipe", key: str = "dtype") -> torch.dtype:
    """Return the torch dtype with this name; raise ``BadInput`` if there is none."""
    if name not in DTYPES:
        raise BadInput(where, key, expected=f"one of {', '.join(DTYPES)}", found=repr(name))
    return DTYPES[name]
