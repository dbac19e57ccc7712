"""Drop what FSDP gathered for a forward without a backward; gather ahead what a pipeline's stage ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .fully_sharded import fsdp_modules

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


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


class ForwardOrder:
    """Hold the order in which the modules of a stage end a forward; ``root``: what FSDP was applied to first.

    With each module of a backward FSDP gathers the one that ended a forward before it. It keeps one order, of
    all forwards since the last step: with the first module of a stage it would gather what ran last before
    the stage did, of another stage or another micro-batch, and hold it until it runs again.
    """

    def __init__(self, root: FSDPModule) -> None:
        self.shared = cast(Any, root)._get_fsdp_state()._comm_ctx
        self.groups: list[Any] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the order of the forward inside, which is the stage's until its next one."""
        start = len(getattr(self.shared, "post_forward_order", ()))  # torch makes it in the first forward
        yield
        self.groups = self.shared.post_forward_order[start:]

    def recall(self) -> None:
        """Let the next backward be of this stage, as if nothing else had run."""
        self.shared.post_forward_order[:] = self.groups
        for group in self.groups:
            group._post_forward_indices.clear()
        for index, group in enumerate(self.groups):
            group._post_forward_indices.append(index)
