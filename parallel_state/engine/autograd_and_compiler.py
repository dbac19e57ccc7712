"""Reach autograd: what follows a backward pass, every operator; and the limits and errors of the compiler."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def after_backward(call: Callable[[], None]) -> None:
    """Call this at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def in_backward() -> bool:
    """Tell whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def allow_graphs(count: int) -> None:
    """Let ``torch.compile`` make so many graphs of one function; beyond 8 it would give up."""
    from .private_names import COMPILER, require  # whose first import looks at torch's other modules

    require(COMPILER)
    config: Any = importlib.import_module("torch._dynamo.config")
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)


def compiler_errors() -> type[Exception]:
    """Return the class of what ``torch.compile`` raises when it cannot compile."""
    errors: type[Exception] = importlib.import_module("torch._dynamo.exc").TorchDynamoException
    return errors
