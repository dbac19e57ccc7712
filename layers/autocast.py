"""Arithmetic that stays in its own dtype inside an autocast region of the user's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Turn autocast off while ``function`` runs, for the device of its first tensor.

    Autocast would compute its products in 16 bits, whatever dtype their factors were brought to before.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _off(next(one for one in args if isinstance(one, Tensor))):
            return function(*args, **kwargs)

    return run


def _off(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    # torch 2.11's compiler cannot trace the first question; what it compiles for has autocast.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    if available and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
