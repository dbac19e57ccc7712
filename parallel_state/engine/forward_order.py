"""Let FSDP gather ahead, in the backward of a stage of a pipeline, what this stage ran before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


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
