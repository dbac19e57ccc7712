"""Drop the weights that FSDP gathered for a forward that no backward follows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .fully_sharded import fsdp_modules


def drop_after_evaluation(root: nn.Module) -> None:
    """Let a forward of ``root`` without gradients drop at its end the weights that it gathered.

    FSDP leaves that to a backward. Until one came, an update or a load would not reach what the next forward
    computes with, and ``root.parameters()`` would not be those of the optimizer.
    """

    def drop(root: nn.Module, inputs: Any, output: Any) -> None:
        if not (torch.is_grad_enabled() or torch.compiler.is_compiling() or root in _GATHERED_ONCE):
            drop_weights(root)

    root.register_forward_hook(drop)


#: The models whose forwards without gradients keep what they gathered.
_GATHERED_ONCE: set[nn.Module] = set()


@contextmanager
def gathered_once(root: nn.Module) -> Iterator[None]:
    """Let forwards of ``root`` without gradients gather weights once, and drop them behind the last."""
    _GATHERED_ONCE.add(root)
    try:
        yield
    finally:
        _GATHERED_ONCE.discard(root)
        drop_weights(root)


def drop_weights(module: nn.Module) -> None:
    """Drop the gathered weights of a module; its parameters are the shards again."""
    for sharded in fsdp_modules(module):
        sharded.reshard()
