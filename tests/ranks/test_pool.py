"""run_parallel: functions go out to the ranks, results come back, and each call starts afresh."""

import os
import pickle
import sys
import warnings
from functools import partial, wraps
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from trilith.parallel_state import Layout, ParallelState
from trilith.ranks.messages import FunctionName
from trilith.ranks.processes import Rendezvous
from trilith.testing import RankError, run_parallel

#: The number of times that this process has executed this file; it outlives the module.
LOADED = "loads of test_pool"
sys.__dict__[LOADED] = sys.__dict__.get(LOADED, 0) + 1


def describe_worker():
    return os.getpid(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], sys.__dict__[LOADED]


def hash_a_string():
    return hash("a string")


def make_tensors():
    large, leaf = torch.arange(1_000_000.0), torch.ones(3, requires_grad=True)
    return large[10:12], large, leaf, leaf * 2, torch.nn.Parameter(torch.zeros(2)), *unusual()


def unusual():
    """Make numbers of two bytes, none, turned ones, and those that torch marks instead of writing them."""
    turned, marked = torch.arange(6.0).view(2, 3).t(), torch.tensor([1 + 2j]).conj()
    return torch.tensor(5.0).bfloat16().expand(1), torch.zeros(0, 3), turned, marked, marked.imag


def return_dtensor():
    return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])


def speak():
    print(f"out {dist.get_rank()}")
    sys.stderr.write("err\n")
    warnings.warn("of ours", stacklevel=1)


def leave_traces():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.rand(7)


def find_traces():
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(3)


def sum_over_axis(groups_before):
    """Use the same mesh and the same operators, with other group names in each call."""
    for _ in range(groups_before):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    x = DTensor.from_local(torch.full((2, 4), float(dist.get_rank())), mesh, [Shard(0)])
    eye = DTensor.from_local(torch.eye(4), mesh, [Replicate()])
    return (x @ eye).sum().full_tensor().item()


def decorate(fn):
    @wraps(fn)
    def wrapper(*args):
        return "wrapped", fn(*args)

    return wrapper


@decorate
def decorated(x):
    return x


class Holder:
    @staticmethod
    def static(x):
        return x * 2


def test_workers_are_started_once_run_one_thread_and_load_a_test_module_once():
    first, second = run_parallel(describe_worker), run_parallel(describe_worker, 4)
    assert first == second, "four ranks unless asked otherwise"
    assert len({pid for pid, *_ in first}) == 4
    assert all(tuple(rest) == (1, "1", 1) for _, *rest in first)
    assert run_parallel(describe_worker, 2) == first[:2], "a narrower call uses the same workers"


def test_neighbours_hash_strings_differently_as_launched_ranks_do():
    hashes = run_parallel(hash_a_string, 3)
    assert hashes[0] != hashes[1] != hashes[2]


def test_tensors_arrive_as_ordinary_copies_of_what_they_show():
    view, large, leaf, product, parameter, *rest = run_parallel(make_tensors, 1)[0]
    assert view.tolist() == [10.0, 11.0]
    assert view.untyped_storage().nbytes() == 8, "a view brings only what it shows"
    assert large.shape == (1_000_000,) and not large.is_shared() and not view.is_shared()
    assert leaf.requires_grad and leaf.is_leaf and product.requires_grad and product.is_leaf
    assert isinstance(parameter, torch.nn.Parameter) and all(map(torch.equal, rest, unusual()))
    assert [(x.dtype, x.shape) for x in rest] == [(x.dtype, x.shape) for x in unusual()]


def test_a_dtensor_is_refused_as_a_result():
    with pytest.raises(RankError, match="full_tensor") as caught:
        run_parallel(return_dtensor, 2)
    assert isinstance(caught.value.cause, TypeError)


def test_functions_with_a_public_name_run_whatever_their_form():
    assert run_parallel(decorated, 1, 3) == [("wrapped", 3)]
    assert run_parallel(Holder.static, 1, 3) == [6]
    assert run_parallel(os.path.join, 1, "a", "b") == ["a/b"]


def test_functions_that_have_no_name_elsewhere_are_refused_and_a_world_without_ranks():
    def inner():
        return 0

    original = decorated.__wrapped__  # the name `decorated` now leads to the wrapper
    for says, *functions in (
        ("is a lambda or lives in another function", inner, lambda: 0),
        ("is not a plain function", partial(decorated, 1), Holder().static.__get__(1), len),
        ("something else under that name", original),
    ):
        for function in functions:
            with pytest.raises(ValueError, match=says):
                run_parallel(function, 2)
    with pytest.raises(ValueError, match="found 0"):
        run_parallel(describe_worker, 0)


def test_the_store_listens_on_this_machine_only():
    rendezvous = Rendezvous()
    port = f":{rendezvous.port:04X}"
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()
    ]
    listening = [
        local.removesuffix(port) for _, local, _, state, *_ in rows if local.endswith(port) and state == "0A"
    ]
    assert listening == ["0100007F"]


def test_what_ranks_print_reaches_stderr_under_their_names(capsys):
    run_parallel(describe_worker, 2)
    capsys.readouterr()
    run_parallel(speak, 2)
    assert capsys.readouterr().err.splitlines() == [
        "[rank 0] out 0",
        "[rank 0] err",
        "[rank 0] warning: of ours",  # without the line of code that Python adds
        "[rank 1] out 1",
        "[rank 1] err",
        "[rank 1] warning: of ours",
    ]


def test_a_call_leaves_nothing_behind():
    clean = run_parallel(find_traces, 2)
    run_parallel(leave_traces, 2)
    after = run_parallel(find_traces, 2)
    assert clean[0][:2] == after[0][:2] == (torch.float32, True)
    assert torch.equal(clean[0][2], after[0][2]), "seeds start at the same place"


def test_a_later_call_does_not_meet_an_earlier_calls_groups():
    assert run_parallel(sum_over_axis, 4, 0) == [8.0, 8.0, 40.0, 40.0]
    assert run_parallel(sum_over_axis, 4, 1) == [8.0, 8.0, 40.0, 40.0]
    assert run_parallel(sum_over_axis, 4, 2) == [8.0, 8.0, 40.0, 40.0]


NESTED = "folder_of_nobody.deep.test_it"
NESTED_SOURCE = """
class Kept:
    def __eq__(self, other):
        return isinstance(other, Kept)

def make():
    return Kept()
"""


def test_a_file_in_folders_that_nobody_can_import_is_loaded_under_its_whole_name(tmp_path, request):
    """pytest names test files so; without the packages above it pickle would find nothing in the module."""
    for parts in (1, 2, 3):
        request.addfinalizer(partial(sys.modules.pop, ".".join(NESTED.split(".")[:parts]), None))
    file = tmp_path / "test_it.py"
    file.write_text(NESTED_SOURCE)
    make = FunctionName(NESTED, str(file), "make").load()
    assert pickle.loads(pickle.dumps(make())) == make()
    assert pickle.loads(pickle.dumps(make)) is make


def hold_a_group_in_a_cycle():
    held = [dist.new_group([0, 1])]
    held.append(held)


def hold_a_group_in_a_cache():
    mesh = ParallelState.start(Layout.of(data=2, zero=1)).data_mesh
    rows, columns = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(dim)]) for dim in (0, 1))
    assert float((rows + columns).full_tensor().sum()) == 32


def count_threads():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("hold", [hold_a_group_in_a_cycle, hold_a_group_in_a_cache])
def test_groups_that_a_call_leaves_behind_are_ended_with_it(hold):
    run_parallel(hold_a_group_in_a_cycle, 2)  # torch's own threads are there after the first groups
    before = run_parallel(count_threads, 2)
    for _ in range(3):
        run_parallel(hold, 2)
    assert run_parallel(count_threads, 2) == before
