"""Choose the block size and the number of workers that fit into a stated amount of memory."""

import resource

from ...parallel_state import BadInput
from ...system.process_info import own_memory
from .execute import BLOCK, BLOCKS_OF_A_WORKER

_SMALLEST_BLOCK = 64 << 10
#: Bytes that a thread needs besides blocks: its stack and small objects.
_OF_A_WORKER = 4 << 20


def block_within(max_ram: int | None, workers: int) -> tuple[int, int]:
    """Return the bytes of a block and the number of workers that keep this process below ``max_ram`` bytes.

    Memory in use already counts (imports, the plan); mapped files do not. ``BadInput`` if that alone is too
    much.
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
    """Return how many bytes of this process's memory come from no file; if unknown, all resident bytes."""
    if (memory := own_memory()) is not None:
        return memory.anonymous
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _need(block: int) -> int:
    return _OF_A_WORKER + BLOCKS_OF_A_WORKER * block
