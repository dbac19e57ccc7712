"""Send what a pipeline's stages give: several tensors as one, between ranks that all connect first."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel_state import require


@dataclass(frozen=True, slots=True)
class Travels:
    """Describe the tensor that one stage sends to the next for one micro-batch on one rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def meta(self) -> Tensor:
        """Return such a tensor without memory."""
        floating = self.dtype.is_floating_point
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=floating)


#: Each tensor that a stage sends for one micro-batch; none from the model's last stage.
StageOutput = tuple[Travels, ...]


def greet(peers: Iterable[int], group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange a number with each of these ranks of a pipeline, all at once. Collective over the pipeline.

    NCCL connects two ranks, and all ranks of the group, at the first send of each kind. In a schedule that
    would be in its midst, in an order that differs from rank to rank.
    """
    ways = (dist.isend, dist.irecv)
    exchange([(way, torch.zeros(1, device=device), peer) for peer in peers for way in ways], group)


def exchange(messages: Sequence[tuple[Callable[..., object], Tensor, int]], group: dist.ProcessGroup) -> None:
    """Send each tensor to its peer (``dist.isend``), or fill it from there (``dist.irecv``), and wait.

    They are batched, as the schedules do it, so that NCCL needs no second connection.
    """
    ops = [dist.P2POp(way, x, group=group, group_peer=peer) for way, x, peer in messages]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    """Return the tensors that a stage sends to the next one, in order."""
    tensors: tuple[Any, ...] = output if isinstance(output, tuple) else (output,)
    require(
        tensors and all(isinstance(tensor, Tensor) for tensor in tensors), "stage", "output",
        "a tensor or a tuple of them between stages", type(output).__name__,
        "Give a tuple of tensors: the next stage gets them by position, in order",
    )  # fmt: skip
    return tensors


def sent_as(output: StageOutput) -> Travels:
    """Describe the one tensor that is sent for several, with a row for each sample."""
    if len(output) == 1:
        return output[0]
    width = sum(prod(tensor.shape[1:]) for tensor in output)
    return Travels((output[0].shape[0], width), output[0].dtype)


def as_one(tensors: tuple[Tensor, ...]) -> Tensor:
    """Return one tensor that is sent for several, with a row for each sample."""
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.flatten(1) for tensor in tensors], dim=1)


def split_sent(x: Tensor, output: StageOutput) -> tuple[Tensor, ...]:
    """Return the tensors for which one was sent."""
    if len(output) == 1:
        return (x,)
    pieces = x.split([prod(tensor.shape[1:]) for tensor in output], dim=1)
    return tuple(piece.view(len(x), *like.shape[1:]) for piece, like in zip(pieces, output, strict=True))
