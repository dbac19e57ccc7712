"""State what was asked of a run by the end of a step, so that all ranks act on it after the same step."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..parallel_state import ParallelState
from .stop_signals import StopSignals
from .switches import KILL, SAVE, STOP, Switches


@dataclass(frozen=True, slots=True)
class Requests:
    """Hold what was asked of any rank.

    ``stop``: 0, or a number that ``why_stopped`` puts into words. ``failed``: a save in the background did.
    """

    stop: int
    save: bool
    kill: bool
    failed: bool


def agree_on_requests(
    signals: StopSignals, switches: Switches, state: ParallelState, *, failed: bool, memory: int
) -> tuple[Requests, int]:
    """Return what was asked of any rank, and the largest ``memory`` of a rank, by one reduction.

    Signals and errors reach ranks at different moments. Collective over all ranks.
    """
    asked = signals.asked(state.rank) or switches.on(STOP)
    stop, save, kill, any_failed, most_memory = all_reduce_max(
        state, asked, switches.on(SAVE), switches.on(KILL), failed, memory
    )
    return Requests(stop, bool(save), bool(kill), bool(any_failed)), most_memory


def all_reduce_max(state: ParallelState, *numbers: int) -> list[int]:
    """Return the largest of each number over all ranks.

    The group of the files is not used: a save in the background may be using it.
    """
    if state.layout.world == 1:
        return [*numbers]
    largest = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [int(number) for number in largest]
