"""Compute in the dtype that a layer chose, also inside a user's autocast region."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Turn autocast off while ``function`` runs, for the device of its first tensor.

    Autocast would compute the products of ``function`` in 16 bits, even if their factors were cast to fp32.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        x = next(arg for arg in args if isinstance(arg, Tensor))
        with torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext():
            return function(*args, **kwargs)

    return run


def autocasts(x: Tensor) -> bool:
    """Return whether an autocast region casts the operators of this tensor's device."""
    kind = x.device.type
    # torch 2.11's compiler cannot trace the first question; what it compiles for has autocast.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    return available and torch.is_autocast_enabled(kind)
