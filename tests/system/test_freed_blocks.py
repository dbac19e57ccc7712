"""Large blocks of freed memory go back to the operating system at once."""

import os
from pathlib import Path

import pytest
import torch
from trilith.parallel_state.process_groups import own_device
from trilith.system.freed_blocks import LARGE, return_large_blocks
from trilith.testing import run_fresh

BLOCKS = 30


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_blocks_between_others(started):
    """Print whether freed blocks have gone back; blocks that stay lie behind each in the heap."""
    torch.ones(
        3 * LARGE, dtype=torch.uint8
    )  # from when this is freed, glibc by itself keeps smaller blocks in its heap
    if started:
        own_device("cpu")  # as every ``ParallelState.start``
    before = resident()
    blocks, others = [], []
    for _ in range(BLOCKS):
        blocks.append(torch.ones(LARGE, dtype=torch.uint8))
        others.append(torch.ones(LARGE // 8, dtype=torch.uint8))
    blocks.clear()
    left = resident() - before - sum(x.nbytes for x in others)
    print("gone" if left < BLOCKS * LARGE / 10 else f"left: {left:,} bytes", flush=True)


@pytest.mark.parametrize("started", [False, True])
def test_blocks_that_a_started_rank_frees_go_back_to_the_system(started):
    (code,) = run_fresh(free_blocks_between_others, 1, started, process_group=False)
    assert code == 0 and ("gone" in code.output) == started, code.output


def test_a_threshold_of_the_environment_stays(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=8388608")
    assert not return_large_blocks()
