"""Working within a stated amount of memory."""

from __future__ import annotations

import resource

from ...parallel_state import BadInput
from ...system.process_info import own_memory
from .execute import BLOCK, BLOCKS_OF_A_WORKER

_SMALLEST_BLOCK = 64 << 10
#: What a thread needs besides blocks: its stack and small objects.
_OF_A_WORKER = 4 << 20


def block_within(max_ram: int | None, workers: int) -> tuple[int, int]:
    """Bytes of a block and number of workers such that this process stays below ``max_ram`` bytes of its own.

    What is in memory already counts (imports, the plan); mapped files do not. ``BadInput`` where that alone
    is too much.
    """
    if max_ram is None:
        return BLOCK, workers
    free = max_ram - anonymous_memory()
    while workers > 1 and free // workers < _need(_SMALLEST_BLOCK):
        workers -= 1
    if free < _need(_SMALLEST_BLOCK):
        needed = max_ram - free + _need(_SMALLEST_BLOCK)
        expected = f"at least {needed / 1e6:,.0f} MB (what is in memory already, and a worker)"
        raise BadInput("convert", "--max-ram", expected=expected, found=f"{max_ram / 1e6:,.0f} MB")
    block = (free // workers - _OF_A_WORKER) // BLOCKS_OF_A_WORKER
    return min(BLOCK, block // 4096 * 4096), workers


def anonymous_memory() -> int:
    """Bytes of this process that are in memory and come from no file; all resident ones where that is
    unknown.
    """
    if (memory := own_memory()) is not None:
        return memory.anonymous
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _need(block: int) -> int:
    return _OF_A_WORKER + BLOCKS_OF_A_WORKER * block
