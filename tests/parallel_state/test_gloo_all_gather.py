"""No all-gather over gloo is of the kind whose name, written by two threads at once, damages the heap."""

import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from trilith.parallel_state import Layout, ParallelState, engine
from trilith.testing import run_parallel

FUNCTIONAL = torch.ops._c10d_functional
ROWS = {
    "fp64": torch.arange(6, dtype=torch.float64).view(3, 2),
    "bf16": torch.arange(4, dtype=torch.bfloat16),
    "int64": torch.arange(3),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "no rows": torch.ones(0, 4),
}


def refuse(outputs, inputs, group, async_op=True):
    raise AssertionError("an all-gather of the kind that damages the heap")


def gathered(x, state):
    """Return the ways to gather ``x`` plus the rank, along the first dim."""
    mine, name = (
        x + state.rank if x.dtype != torch.bool else x ^ bool(state.rank),
        state.tensor.group.group_name,
    )
    several = FUNCTIONAL.all_gather_into_tensor_coalesced([mine, mine], 2, name)
    ways = [engine.all_gather(mine, 0, state.tensor.group), *map(FUNCTIONAL.wait_tensor, several)]
    if x.dtype.is_floating_point:
        ways.append(DTensor.from_local(mine, state.tensor_mesh, [Shard(0)]).full_tensor())
    return ways


def gather_all(compiled):
    """Gather while the operator that torch's own functional all-gathers call, of the harmful kind, raises."""
    state = ParallelState.start(Layout.of(tensor=2))
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel is replaced
        library.impl("allgather_into_tensor_coalesced_", refuse, "CPU")
    try:
        if compiled:
            along = torch.compile(engine.all_gather, fullgraph=True)
            return [along(x + state.rank, 0, state.tensor.group) for x in (ROWS["fp64"], ROWS["bf16"])]
        return [gathered(x, state) for x in ROWS.values()]
    finally:
        library._destroy()


def test_every_way_to_gather_is_of_the_harmless_kind():
    for ways in run_parallel(gather_all, 2, False):
        for x, results in zip(ROWS.values(), ways, strict=True):
            other = ~x if x.dtype == torch.bool else x + 1
            assert all(torch.equal(result, torch.cat([x, other])) for result in results), x


def test_so_is_compiled_code():
    for results in run_parallel(gather_all, 2, True):
        for x, result in zip((ROWS["fp64"], ROWS["bf16"]), results, strict=True):
            assert torch.equal(result, torch.cat([x, x + 1]))


def gather_in_flight(seconds):
    """Keep both threads of a group busy, so that they end collectives at once."""
    group = ParallelState.start(Layout()).tensor.group.group_name
    x, end = torch.ones(8), time.monotonic() + seconds
    while time.monotonic() < end:
        running = [FUNCTIONAL.all_gather_into_tensor(x, 1, group) for _ in range(50)]
        assert all(torch.equal(FUNCTIONAL.wait_tensor(result), x) for result in running)
    return dist.get_rank()


@pytest.mark.slow  # with torch's own operator most runs end by SIGABRT or SIGSEGV
def test_the_heap_outlives_a_hundred_thousand_gathers():
    assert run_parallel(gather_in_flight, 1, 8.0) == [0]
