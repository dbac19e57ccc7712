"""Each rank has a device of its own, and a group that carries tensors of the host and of the device."""

import atexit
import os
import signal
import socket
import sys
import time
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.refusals import Refused, refusals
from torch.distributed.tensor import DTensor, Shard
from trilith.cli import main
from trilith.parallel_state import (
    BadInput,
    Layout,
    ParallelState,
    abandon_process_group,
    engine,
    init_process_group,
    own_device,
)
from trilith.parallel_state.process_groups import (
    TIMEOUT,
    agree,
    check_backends,
    identity,
    start_process_group,
)
from trilith.testing import RankError, run_fresh, run_parallel

CUDA = torch.device("cuda", 1)
TASK = {"SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "gpu[07-08]"}


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    """Let this machine have two GPUs, of which the second is the current one; yield what is made current."""
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", *TASK):
        monkeypatch.delenv(name, raising=False)
    current = [1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.mark.parametrize(
    ("device", "variables", "index"),
    [
        ("cuda", {"LOCAL_RANK": "0"}, 0),
        ("cuda", {"LOCAL_RANK": "1"} | TASK, 1),
        ("cuda", TASK, 0),
        ("cuda", {}, 1),
        ("cuda:0", {"LOCAL_RANK": "1"}, 0),
    ],
)
def test_a_rank_computes_on_the_device_of_its_number(device, variables, index, two_gpus, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert own_device(device) == torch.device("cuda", index) and two_gpus[1:] == [index]


def test_the_host_is_no_device_to_choose(two_gpus):
    assert own_device("cpu") == torch.device("cpu") and two_gpus[1:] == []


def test_the_group_connects_on_the_device_at_once():
    for device, backend, more in ((CUDA, "cpu:gloo,cuda:nccl", {"device_id": CUDA}), ("cpu", "gloo", {})):
        with mock.patch.object(dist, "init_process_group") as start:
            init_process_group(torch.device(device), TIMEOUT)
        start.assert_called_once_with(backend, timeout=TIMEOUT, **more)


def beyond(folder):
    with mock.patch.dict("os.environ", LOCAL_RANK="2"):
        ParallelState.start(Layout(), device="cuda")


def starts(device):
    return lambda _: start_process_group(torch.device(device), TIMEOUT)


def carried(backends, device):
    def start(folder):
        with mock.patch.object(dist, "get_backend_config", lambda: backends):
            check_backends(torch.device(device))

    return start


test_what_no_rank_can_use_is_refused = refusals(
    Refused("more ranks than devices", beyond, "device: expected one of the 2 devices .* found cuda:2"),
    Refused("a device of no ranks", starts("meta"), "device: expected cpu or cuda, found meta"),
    Refused("no launcher", starts("cpu"), "^environment: RANK: expected torchrun's variables.* Start with"),
    Refused("no such device", lambda _: own_device("cuda:9"), "found cuda:9"),
    Refused(
        "NCCL alone",
        carried("cuda:nccl", "cuda:0"),
        r'a backend for cpu, found cuda:nccl.*init_process_group\("cpu:gloo,cuda:nccl"\)',
    ),
    Refused("gloo for the host alone", carried("cpu:gloo", "cuda:0"), "a backend for cuda, found cpu:gloo"),
    Refused("NCCL and a model on the host", carried("cuda:nccl", "cpu"), r'init_process_group\("gloo"\)'),
)


@pytest.mark.parametrize(
    ("backends", "device", "name"),
    [
        ("cpu:gloo,cuda:nccl", CUDA, f"GPU-1 of {socket.gethostname()}"),
        ("cpu:gloo,cuda:gloo", CUDA, None),  # whose ranks may share one
        ("cpu:gloo", torch.device("cpu"), None),
    ],
)
def test_a_gpu_of_one_rank_has_a_name_in_the_world(backends, device, name, monkeypatch):
    known = {CUDA: SimpleNamespace(uuid="GPU-1")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", known.__getitem__)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    assert identity(device) == name


def share(devices):
    agree(devices[dist.get_rank()])


def test_two_ranks_on_one_gpu_are_refused_on_every_rank():
    run_parallel(share, 2, ["GPU-1 of a", "GPU-1 of b"])
    run_parallel(share, 2, [None, None])
    with pytest.raises(RankError) as error:
        run_parallel(share, 2, ["GPU-1 of a"] * 2)
    causes = [failure.cause for failure in error.value.failures]
    assert [type(cause) for cause in causes] == [BadInput] * 2
    assert "GPU-1 of a for the ranks 0 and 1" in str(causes[0])


def fail_alone(kind):
    dist.init_process_group("gloo")
    dist.barrier()  # a peer that ends before all are connected is another fault
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)  # the peer never joins
        abandon_process_group(torch.device(kind))
        assert dist.is_initialized() == (kind == "cpu")


class Witness:
    """Say that the interpreter is taken apart: modules are let go after the exit functions."""

    def __del__(self):
        os.write(1, b"taken apart\n")


def end_as_a_command():
    """Lose the peer while collectives are under way whose ends Python waits for, and end with code 3."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(64):
        dist.all_reduce(torch.ones(2**16), async_op=True).get_future().then(lambda future: future.value())
    abandon_process_group(torch.device("cpu"))
    sys.modules["witness"] = Witness()
    atexit.register(print, "an exit function")
    with mock.patch("trilith.cli.app.run", lambda words: 3):
        main()


def test_a_failed_rank_ends_with_its_code_while_threads_of_its_group_go_on():
    codes = run_fresh(end_as_a_command)
    assert codes == [3, -signal.SIGKILL], codes
    assert codes[0].output == "an exit function\n"


def test_a_failed_rank_gives_up_an_accelerators_group_without_waiting():
    for kind in ("cuda", "cpu"):
        codes = run_fresh(fail_alone, 2, kind, process_group=False)
        assert not any(codes), codes[0].output


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
