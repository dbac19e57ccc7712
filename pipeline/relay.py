"""Run one forward through the stages of a pipeline, one after the other; ranks send on what stages give."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel_state import ParallelState


@dataclass(frozen=True, slots=True)
class Travels:
    """Describe the tensor that one stage sends to the next for one micro-batch on one rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def meta(self) -> Tensor:
        """Return such a tensor without memory."""
        floating = self.dtype.is_floating_point
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=floating)


def through_stages(
    stages: Sequence[int],
    run: Callable[[int, Tensor | None], Tensor | None],
    input_of: Callable[[int], Travels],
    state: ParallelState,
) -> None:
    """Run this rank's ``stages``, by their numbers in the whole model; collective over the pipeline.

    ``run(stage, x)`` computes one and returns what is sent on; of the last stage nothing is. ``x`` is what
    the stage before gave, ``None`` for the first. ``input_of(stage)`` describes it where it is received.
    """
    rank_of, here, x = state.layout.rank_of_stage, state.at.pipeline, None
    for stage in stages:
        if stage and (before := rank_of(stage - 1)) != here:
            expected = input_of(stage)
            x = torch.empty(expected.shape, dtype=expected.dtype, device=state.device)
            exchange(dist.irecv, x, before, state.pipeline_group)
        x = run(stage, x if stage else None)
        if stage < state.layout.stages - 1 and (after := rank_of(stage + 1)) != here:
            assert x is not None, "each stage but the last gives something"
            exchange(dist.isend, x.contiguous(), after, state.pipeline_group)


def greet(peers: Iterable[int], group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange a number with each of these ranks of a pipeline, all at once. Collective over the pipeline.

    NCCL connects two ranks, and all ranks of the group, at the first send of each kind. In a schedule that
    would be in its midst, in an order that differs from rank to rank.
    """
    numbers = [
        (way, peer, torch.zeros(1, device=device)) for peer in peers for way in (dist.isend, dist.irecv)
    ]
    ops = [dist.P2POp(way, number, group=group, group_peer=peer) for way, peer, number in numbers]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def exchange(way: Callable[..., object], x: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Send ``x`` to ``peer`` (``dist.isend``), or fill it from there (``dist.irecv``), and wait.

    It is batched, as the schedules do it, so that NCCL needs no second connection.
    """
    for work in dist.batch_isend_irecv([dist.P2POp(way, x, group=group, group_peer=peer)]):
        work.wait()
