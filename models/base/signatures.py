"""Tell blocks of different kinds apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def signature(block: nn.Module) -> object:
    """Return what tells a block from others: every module's class and settings, every parameter's shape."""
    modules = tuple(
        (path, type(module), tuple(sorted(_settings(vars(module))))) for path, module in block.named_modules()
    )
    parameters = tuple(
        (name, parameter.shape, parameter.requires_grad, parameter.dtype)
        for name, parameter in block.named_parameters()
    )
    return modules, parameters


def _settings(attributes: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in attributes.items():
        if isinstance(value, int | float | str | tuple | None):
            yield name, repr(value)
