"""Measure what the host does in a block that has next to nothing to compute: Python, autograd, threads.

A figure is the difference between a Llama of 10 such blocks and one of 2, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import torch

from ...layers import Checkpointing, checkpoint_blocks
from ...parallel_state import ParallelState, initialize
from ...simulation.micro_batch import MicroBatch
from ...simulation.pieces import ModelPieces
from ...simulation.trace import Trace
from ..random_files import built, llama
from .timing import seconds_of

if TYPE_CHECKING:
    from ...models import CausalLM

_FEW, _MANY = 2, 10
_TOKENS = 8
#: The modes of checkpointing that compute a block again, and differ in what the host does for it.
AGAIN: tuple[Checkpointing, ...] = ("full", "selective")


def operator_seconds(device: torch.device, rounds: int) -> float:
    """Return the seconds of an operator of a block, forward and backward, with Python and autograd between
    operators.
    """
    return _seconds(device, rounds, "none") / len(_traced("none", device.type == "cuda").operators)


def added_by(device: torch.device, rounds: int, mode: Checkpointing) -> float:
    """Return the seconds that this mode of checkpointing adds for each operator of a block's forward."""
    operators = _traced(mode, device.type == "cuda").operators
    forward = [operator for operator in operators if operator.phase == "forward"]
    added = _seconds(device, rounds, mode) - _seconds(device, rounds, "none")
    return max(0.0, added) / len(forward)


def block_seconds(device: torch.device, rounds: int, mode: Checkpointing = "none") -> float:
    """Return the seconds of a block on one rank, forward and backward, without collectives."""
    return _seconds(device, rounds, mode)


def collective_seconds(state: ParallelState, rounds: int, mode: Checkpointing, *, alone: float) -> float:
    """Return the seconds that a collective of ``state``, over tensor ranks or around a ring of context ranks,
    adds to its block, which takes ``alone`` seconds without it. Collective.

    A rank wakes the thread that sends, and waits for the other ranks, which reach the collective at other
    moments. All of this takes longer than the same collective in a loop of its own. Around a ring each
    exchange also brings keys and values to which attention is computed by more operators.
    """
    added = _seconds(state.device, rounds, mode, state) - alone
    return max(0.0, added) / len(_traced(mode, False, state).collectives)


def _traced(mode: Checkpointing, gpu: bool, state: ParallelState | None = None) -> Trace:
    """Return the trace of a block, with what a checkpointed block repeats."""
    model = _model(_FEW, state)
    pieces = ModelPieces(model, model.state)
    return pieces.block(model.layers["0"], MicroBatch(1, _TOKENS, gpu=gpu), reached=True).under(mode)


def _seconds(
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


def _model(blocks: int, state: ParallelState | None = None, device: torch.device | str = "meta") -> CausalLM:
    """Return a Llama of 8 numbers a head, with two heads or one for each tensor rank."""
    heads = 2 if state is None else max(2, state.tensor.size)
    raw = llama(8 * heads, blocks, ids=8 * heads, heads=heads, groups=heads, intermediate_size=16 * heads)
    return built(raw, state=state, device=device)
