"""Measure how long the data ranks of a CPU take to gather and to sum a group of parameters, as FSDP does it.

In a step both take longer than the same collective in a loop: FSDP copies a block's parameters together and
apart again, in memory that no core has in its cache, and ranks come late. A block is timed, forward and
backward, on a rank alone and at three ZeRO stages. They differ by what they send for a block: an all-reduce
at stage 0, a gather and a reduce-scatter at stage 1, one gather more at stage 3.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..models import family_of
from ..parallel_state import Layout, ParallelState, initialize
from ..planner.time.measured import FIGURE_NAMES
from ..training import Precision, shard_over_data
from .row import Figures
from .timing import seconds_of

#: Blocks of the two models whose difference counts, rounds, and the tokens of a round.
_FEW, _MANY, _ROUNDS, _TOKENS = 2, 6, 20, 8
#: Widths of a block: one has next to nothing to send, the other about 3 MiB.
_NARROW, _WIDE = 16, 256


def exchange_figures(world: int, figures: Figures) -> Figures:
    """Return, for each kind of collective, the microseconds that it takes for a tiny group of parameters, and
    the GB/s at which a larger group's bytes are sent beside. Collective over all ``world`` ranks.

    ``figures``: with the GB/s of the same kinds in a loop; a step is never faster.
    """
    small, (large, size) = _exchanges(world, _NARROW)[0], _exchanges(world, _WIDE)
    found: Figures = {}
    for kind, name in FIGURE_NAMES.items():
        sent = size * (world - 1) / world * (2 if kind == "all_reduce" else 1)
        rate = float(figures[f"{name}: GB/s"] or 0.0)
        longer = large[kind] - max(small[kind], 0.0)
        found[f"{name} of a tiny block: us"] = max(small[kind], 0.0) * 1e6
        found[f"{name} of a block: GB/s"] = min(rate, sent / longer / 1e9) if longer > 0 else rate
    return found


def _exchanges(world: int, width: int) -> tuple[dict[str, float], int]:
    """Return the seconds that each kind of collective adds to a block of this width, and the bytes of the
    block.
    """
    states = {"alone": ParallelState.alone()}
    for zero in (0, 1, 3):
        states[f"zero {zero}"] = ParallelState.start(Layout.of(data=world, zero=zero), device="cpu")
    models = {
        name: [_forward_and_backward(blocks, width, state) for blocks in (_FEW, _MANY)]
        for name, state in states.items()
    }
    rounds = []
    for _ in range(_ROUNDS + 2):
        found = {}
        for name, (few, many) in models.items():
            dist.barrier()
            less, more = (seconds_of(work, torch.device("cpu")) for work in (few, many))
            found[name] = (more - less) / (_MANY - _FEW)
        rounds.append(found)
    one = {name: median(found[name] for found in rounds[2:]) for name in models}
    gather = max(one["zero 3"] - one["zero 1"], 0.0)
    seconds = {
        "all_reduce": one["zero 0"] - one["alone"],
        "all_gather": gather,
        "reduce_scatter": one["zero 1"] - one["alone"] - gather,
    }
    block = _model(1, width, states["alone"]).layers
    return seconds, sum(one.numel() * one.element_size() for one in block.parameters())


def _forward_and_backward(blocks: int, width: int, state: ParallelState) -> Callable[[], None]:
    model = shard_over_data(_model(blocks, width, state), state, Precision())
    initialize(model, 0, state=state)
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64)

    def work() -> None:
        for one in model.parameters():
            one.grad = None
        model(ids).sum().backward()

    return work


def _model(blocks: int, width: int, state: ParallelState) -> Any:
    raw: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 16, "hidden_size": width, "intermediate_size": 11 * width // 4,
        "num_hidden_layers": blocks, "num_attention_heads": 8, "num_key_value_heads": 8,
    }  # fmt: skip
    family = family_of(raw)
    return family.build(family.from_hf(raw), state=state, device="cpu")
