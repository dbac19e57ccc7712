"""Measure how long the data ranks of a CPU take to gather and to sum a group of parameters, as FSDP does it.

In a step both take longer than the same collective in a loop: FSDP copies a block's parameters together and
apart again, in memory that no core has in its cache, and ranks come late. So FSDP is timed while a small
model computes forward and backward with ZeRO 3, which gathers and sums each block. With ZeRO 0 the sums run
while backward goes on, and take its core meanwhile; they are the difference to a rank alone.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...parallel_state import Layout, ParallelState, engine, initialize
from ...planner.time.measured import FIGURE_NAMES
from ...training import Precision, shard_over_data
from ..random_files import built, llama
from .row import Figures
from .timing import seconds_of

if TYPE_CHECKING:
    from ...models import CausalLM

#: Blocks of the model, and the tokens of a round.
_BLOCKS, _TOKENS = 6, 256
#: Widths of a block: one has next to nothing to send, the other about 3 MiB.
_NARROW, _WIDE = 16, 256


def exchange_figures(world: int, figures: Figures, rounds: int) -> Figures:
    """Return, for each kind of collective, the microseconds that it takes for a tiny group of parameters, and
    the GB/s at which a larger group's bytes are sent beside. Collective over all ``world`` ranks.

    ``figures``: with the GB/s of the same kinds in a loop; a step is never faster.
    """
    small, (large, size) = _exchanges(world, _NARROW, rounds)[0], _exchanges(world, _WIDE, rounds)
    measured: Figures = {}
    for kind, name in FIGURE_NAMES.items():
        sent = size * (world - 1) / world * (2 if kind == "all_reduce" else 1)
        rate = float(figures[f"{name}: GB/s"] or 0.0)
        longer = large[kind] - max(small[kind], 0.0)
        measured[f"{name} of a tiny block: us"] = max(small[kind], 0.0) * 1e6
        measured[f"{name} of a block: GB/s"] = min(rate, sent / longer / 1e9) if longer > 0 else rate
    return measured


def _exchanges(world: int, width: int, rounds: int) -> tuple[dict[str, float], int]:
    """Return the seconds that each kind of collective takes for a block of this width, and the bytes of the
    block.
    """
    sharded, whole = (_shared(width, Layout.of(data=world, zero=zero)) for zero in (3, 0))
    single = _initialized(_model(width, ParallelState.alone()))
    blocks = [*sharded.layers.values()]
    sharded_work, whole_work, alone = map(_forward_and_backward, (sharded, whole, single))
    seconds_of_rounds: list[dict[str, float]] = []
    for _ in range(rounds + 2):
        dist.barrier()
        with engine.clocked(engine.fsdp_modules(sharded.layers)) as spent:
            sharded_work()
        dist.barrier()
        longer = seconds_of(whole_work) - seconds_of(alone)
        gathered = spent["all_gather"] / 2 / len(blocks)  # in forward and in backward
        scattered = spent["reduce_scatter"] / len(blocks)
        reduced = longer / len(engine.fsdp_modules(whole))  # the root's too
        seconds_of_rounds.append({"all_gather": gathered, "reduce_scatter": scattered, "all_reduce": reduced})
    medians = {
        kind: median(seconds[kind] for seconds in seconds_of_rounds[2:]) for kind in seconds_of_rounds[0]
    }
    return medians, sum(
        parameter.numel() * parameter.element_size() for parameter in single.layers["0"].parameters()
    )


def _shared(width: int, layout: Layout) -> CausalLM:
    state = ParallelState.start(layout, device="cpu")
    return _initialized(shard_over_data(_model(width, state), state, Precision()), state)


def _initialized(model: CausalLM, state: ParallelState | None = None) -> CausalLM:
    initialize(model, 0, state=state)
    return model


def _forward_and_backward(model: CausalLM) -> Callable[[], None]:
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64)

    def work() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(ids).sum().backward()

    return work


def _model(width: int, state: ParallelState) -> Any:
    return built(llama(width, _BLOCKS, ids=16, groups=8), state=state, device="cpu")
