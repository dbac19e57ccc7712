"""Measure what the host does in small blocks: Python, autograd, threads, collectives, FSDP.

A figure of a block that has next to nothing to compute is the difference between a Llama of 10 such blocks
and one of 2, forward and backward.

Data ranks of a CPU gather and sum a group of parameters in more time than the same collective in a loop: FSDP
copies a block's parameters together and apart again, in memory that no core has in its cache, and ranks come
late. So FSDP is timed while a small model computes forward and backward with ZeRO 3, which gathers and sums
each block. With ZeRO 0 the sums run while backward goes on, and take its core meanwhile; they are the
difference to a rank alone.
"""

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...layers import Checkpointing, checkpoint_blocks
from ...parallel_state import Layout, ParallelState, engine, initialize
from ...parallel_state.engine.measuring import clocked
from ...planner.time.measured import FIGURE_NAMES
from ...simulation.micro_batch import MicroBatch
from ...simulation.pieces import ModelPieces
from ...simulation.trace import Trace
from ...training import Precision, shard_over_data
from ..random_files import built, llama
from .timing import Figures, seconds_of

if TYPE_CHECKING:
    from ...models import CausalLM

_FEW, _MANY = 2, 10
_TOKENS = 8
#: The modes of checkpointing that compute a block again, and differ in what the host does for it.
AGAIN: tuple[Checkpointing, ...] = ("full", "selective")


def operator_seconds(device: torch.device, rounds: int) -> float:
    """Return the seconds of an operator of a block, forward and backward, Python and autograd included."""
    return block_seconds(device, rounds, "none") / len(_traced("none", device.type == "cuda").operators)


def added_by(device: torch.device, rounds: int, mode: Checkpointing) -> float:
    """Return the seconds that this mode of checkpointing adds for each operator of a block's forward."""
    operators = _traced(mode, device.type == "cuda").operators
    forward = [operator for operator in operators if operator.phase == "forward"]
    added = block_seconds(device, rounds, mode) - block_seconds(device, rounds, "none")
    return max(0.0, added) / len(forward)


def collective_seconds(state: ParallelState, rounds: int, mode: Checkpointing, *, alone: float) -> float:
    """Return the seconds that a collective of ``state``, over tensor ranks or around a ring of context ranks,
    adds to its block, which takes ``alone`` seconds without it. Collective.

    A rank wakes the thread that sends, and waits for the other ranks, which reach the collective at other
    moments. All of this takes longer than the same collective in a loop of its own. Around a ring each
    exchange also brings keys and values to which attention is computed by more operators.
    """
    added = block_seconds(state.device, rounds, mode, state) - alone
    return max(0.0, added) / len(_traced(mode, False, state).collectives)


def _traced(mode: Checkpointing, gpu: bool, state: ParallelState | None = None) -> Trace:
    """Return the trace of a block, with what a checkpointed block repeats."""
    model = _model(_FEW, state)
    pieces = ModelPieces(model, model.state)
    return pieces.block(model.layers["0"], MicroBatch(1, _TOKENS, gpu=gpu), reached=True).under(mode)


def block_seconds(
    device: torch.device, rounds: int, mode: Checkpointing, state: ParallelState | None = None
) -> float:
    """Time a block, forward and backward. Each round times both models: other work slows both."""
    few, many = (_forward_and_backward(blocks, device, mode, state) for blocks in (_FEW, _MANY))
    for _ in range(2):  # these do not count
        few(), many()
    longer: list[float] = []
    # On a machine that is very busy more blocks may take less time.
    while not longer or (median(longer) <= 0 and len(longer) < 8 * rounds):
        longer += [-seconds_of(few, device) + seconds_of(many, device) for _ in range(rounds)]
    return median(longer) / (_MANY - _FEW)


def _forward_and_backward(
    blocks: int, device: torch.device, mode: Checkpointing, state: ParallelState | None
) -> Callable[[], object]:
    model = _model(blocks, state, device)
    initialize(model, 0, state=state)
    checkpoint_blocks(model.numbered_blocks().items(), mode)
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=device)
    return lambda: model(ids).sum().backward()


def _model(
    blocks: int, state: ParallelState | None = None, device: torch.device | str = "meta"
) -> "CausalLM":
    """Return a Llama of 8 numbers a head, with two heads or one for each tensor rank."""
    heads = 2 if state is None else max(2, state.tensor.size)
    raw = llama(8 * heads, blocks, ids=8 * heads, heads=heads, groups=heads, intermediate_size=16 * heads)
    return built(raw, state=state, device=device)


#: Blocks of the model under FSDP, and the tokens of a round.
_BLOCKS, _ROUND = 6, 256
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
    """Return the seconds of each kind of collective for a block of this width, and the block's bytes."""
    states = [ParallelState.start(Layout.of(data=world, zero=zero), device="cpu") for zero in (3, 0)]
    models = [_initialized(width, state) for state in (*states, ParallelState.alone())]
    sharded, whole, single = models
    blocks = [*sharded.layers.values()]
    sharded_work, whole_work, alone = map(_anew, models)
    seconds_of_rounds: list[dict[str, float]] = []
    for _ in range(rounds + 2):
        dist.barrier()
        with clocked(engine.fsdp_modules(sharded.layers)) as spent:
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


def _anew(model: "CausalLM") -> Callable[[], None]:
    ids = torch.zeros(1, _ROUND, dtype=torch.int64)

    def work() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(ids).sum().backward()

    return work


def _initialized(width: int, state: ParallelState) -> "CausalLM":
    model = built(llama(width, _BLOCKS, ids=16, groups=8), state=state, device="cpu")
    shard_over_data(model, state, Precision())
    initialize(model, 0, state=state)
    return model
