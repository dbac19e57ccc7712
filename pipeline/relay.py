"""Run one forward through the stages of a pipeline, one after the other, sending hidden states between
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ..layers import Stage
from ..models.base.family import CausalLM


def through_stages(
    model: CausalLM,
    tokens: Tensor,
    run: Callable[[Stage, Tensor], Tensor],
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor | None:
    """Return what the last stage computes, on the rank that holds it; ``None`` on the others.

    ``run(stage, x)`` computes one of this rank's stages. ``tokens``: the input of the first stage. ``shape``
    and ``dtype``: those of the hidden states between stages. Collective over the pipeline.
    """
    state = model.state
    here, holder = state.at.pipeline, state.layout.rank_of_stage
    out = None
    for stage in model.stage.parts:
        x = tokens
        if not stage.first:
            before = holder(stage.number - 1)
            if before != here:
                x = torch.empty(shape, dtype=dtype, device=tokens.device)
                exchange(dist.irecv, x, before, state.pipeline_group)
            else:
                assert out is not None
                x = out
        out = run(stage, x)
        if not stage.last and (after := holder(stage.number + 1)) != here:
            exchange(dist.isend, out.to(dtype).contiguous(), after, state.pipeline_group)
    return out if model.stage.parts[-1].last else None


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
