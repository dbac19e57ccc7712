"""The simulated device refuses what a real one refuses, and notices each wait of the host."""

import importlib
import traceback
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from trilith.layers.host_numbers import change_alike, on_host, send
from trilith.parallel_state import Layout
from trilith.parallel_state.engine import local_data
from trilith.simulation import WAITS, Mixed, simulated_rank
from trilith.simulation.device import NewWait
from trilith.simulation.ledger import Ledger


@contextmanager
def device():
    with simulated_rank(Layout(), 0, ()) as (state, seen):
        yield torch.ones(4, device=state.device), seen


def mixes():
    with device() as (x, seen):
        with pytest.raises(Mixed, match=r"aten::add of \[4\] on simulated:0, \[4\] on cpu"):
            x + torch.ones(4)
        with pytest.raises(Mixed, match="a generator of cpu"):
            torch.rand(4, device=x.device, generator=torch.Generator())
        assert (x + torch.tensor(2.0)).device == x.device  # a number of the host is no mixing
        assert not seen.waited


def reads():
    with device() as (x, _):
        for read in (
            lambda: x.sum().item(),
            lambda: x.tolist(),
            lambda: bool(x.any()),
            lambda: float(x[0]),
            lambda: x.cpu(),
            lambda: x.to("cpu", torch.float64),
            lambda: torch.empty(4).copy_(x),
            lambda: torch.equal(x, x),
            lambda: torch.bincount(x.long(), minlength=3),
            lambda: torch.get_device_module(x.device).synchronize(),
        ):
            with pytest.raises(NewWait, match=r"reads: line \d+: \w+: the host waits .* not on the list"):
                read()
        for read in (lambda: x.nonzero(), lambda: x[x > 0], lambda: x.repeat_interleave(x.long())):
            with pytest.raises(Exception, match="aten"):  # torch's own refusal of shapes that depend on data
                read()


def copies():
    with device() as (x, seen):
        with pytest.raises(NewWait, match="upload"):
            torch.tensor([1.0, 2.0], device=x.device)
        with pytest.raises(NewWait, match="upload"):
            torch.ones(4).to(x.device)
        seen.waited.clear()
        torch.ones(4).to(x.device, non_blocking=True)
        assert not seen.waited


def counts():
    with device() as (x, _), Ledger(x.device.type) as ledger:
        y = x.view(2, 2) @ x.view(2, 2)
        assert y.shape == (2, 2) and y.device == x.device and ledger.now == 16
    (product,) = ledger.operators.values()
    assert (product.name, product.count, product.flops, product.moved) == ("aten::mm", 1, 16, 3 * 16)


def collectives():
    with simulated_rank(Layout.of(data=4), 2, ()) as (state, _):
        assert state.rank == 2 and dist.get_world_size() == 4
        here, there = torch.ones(2), torch.ones(2, device=state.device)
        dist.all_reduce(here)
        dist.all_reduce(there)
        assert here.tolist() == [4.0, 4.0]  # as if all ranks had the same


def known_numbers():
    """The host knows what it sent, and views of it, without waiting; not what changed since."""
    with device() as (x, _):
        numbers = torch.arange(12).view(4, 3)
        sent = send(numbers, x.device)
        views = [lambda y: y, lambda y: y[2:].view(-1), lambda y: y[:, 1]]
        for view in views:
            assert torch.equal(on_host(view(sent)), view(numbers))
        assert torch.equal(on_host(change_alike(lambda y: y.flip(0), sent)), numbers.flip(0))
        assert on_host(sent + 1) is None and on_host(numbers) is numbers
        sent.add_(1)
        assert on_host(sent) is None


def two_ranks():
    """Be one rank after another: DTensor would take the shapes of the first one's piece for the second."""
    layout = Layout.of(data=2, zero=3)
    for rank, rows in enumerate((2, 1)):
        with simulated_rank(layout, rank, ()) as (state, _):
            here = torch.empty(rows, 4, device=state.device)
            whole = DTensor.from_local(
                here, state.data_mesh, [Shard(0)], run_check=False, shape=torch.Size((3, 4)), stride=(4, 1)
            )
            assert local_data(whole.view(3, 2, 2)).shape == (rows, 2, 2)


NOTICED = [mixes, reads, copies, counts, collectives, known_numbers, two_ranks]


def each(folder):
    """Run them one after the other; write what each raises."""
    for function in NOTICED:
        try:
            function()
            (folder / function.__name__).touch()
        except BaseException:
            (folder / function.__name__).write_text(traceback.format_exc())


@pytest.fixture(scope="module")
def outcomes(alone, tmp_path_factory):
    """Run all in one process: a new one would import for seconds."""
    folder = tmp_path_factory.mktemp("outcomes")
    alone(each, folder)
    return folder


@pytest.mark.parametrize("function", NOTICED)
def test_the_device_notices(function, outcomes):
    assert (outcomes / function.__name__).read_text() == ""


def test_every_place_on_the_list_of_waits_is_a_function_of_today():
    for path, name in (wait.place.split(": ") for wait in WAITS):
        module = path if path.startswith("torch/") else f"trilith/{path}"
        found = importlib.import_module(module.removesuffix(".py").replace("/", "."))
        for part in name.split("."):
            found = getattr(found, part)
