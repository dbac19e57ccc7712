"""How a layout is compared with one device: what differs, what is rounding; ranks that share a GPU."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from support.shared_gpu import STAGED
from torch.utils._python_dispatch import TorchDispatchMode
from trilith.parallel_state import Box
from trilith.testing import assemble, differences, run_parallel
from trilith.testing.layouts import as_pieces, zero_share

LARGE = torch.tensor([-4.0, 2.0], dtype=torch.float64)


def piece(start, *numbers, owner=True):
    return Box((start,), (start + len(numbers),)), owner, torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("found", "relative"),
    [
        ([-4.0, 2.0], 0.0),
        ([-4.0, 2.1], 0.1 / 4),
        ([-4.0, float("nan")], float("inf")),
        ([-4.0, 2.0, 0.0], float("inf")),
    ],
)
def test_a_difference_is_relative_to_the_largest_element_and_nan_and_other_shapes_are_infinite(
    found, relative
):
    ranks = [as_pieces({"a": LARGE}), as_pieces({"a": torch.tensor(found, dtype=torch.float64)})]
    assert dict(differences({"a": LARGE}, ranks)) == {"a": pytest.approx(relative)}


def test_names_on_one_side_only_differ_and_the_last_tensor_comes_first():
    one, other = {"a": LARGE, "b": LARGE}, {"b": LARGE, "c": LARGE}
    assert [*differences(one, [as_pieces(other)])] == [("c", float("inf")), ("b", 0.0), ("a", float("inf"))]


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float64, 1.3e-7), (torch.float32, 9e-4), (torch.bfloat16, 0.12)]
)
def test_a_tensor_that_is_zero_but_for_rounding_counts_as_a_share_of_the_largest(dtype, share):
    large, nothing = torch.tensor([8.0], dtype=dtype), torch.tensor([1e-20], dtype=dtype)
    found = as_pieces({"large": large, "nothing": nothing + 1e-10})
    apart = dict(differences({"large": large, "nothing": nothing}, [found]))
    assert zero_share(dtype) == pytest.approx(share, rel=0.1)
    assert apart["nothing"] == pytest.approx(1e-10 / (8 * zero_share(dtype)), rel=0.01)


def test_pieces_are_put_together_if_each_element_is_owned_once_and_copies_are_equal():
    ranks = [{"a": piece(0, 1.0, 2.0)}, {"a": piece(2, 3.0)}, {"a": piece(1, 2.0, owner=False)}]
    assert assemble(ranks)["a"].tolist() == [1.0, 2.0, 3.0]
    for wrong, says in (
        (piece(1, 2.5, owner=False), "copies differ"),
        (piece(1, 2.0), "exactly one owner"),
        (piece(3, 4.0, owner=False), "exactly one owner"),
    ):
        with pytest.raises(AssertionError, match=says):
            assemble([*ranks[:2], {"a": wrong}])


class ThroughHost(TorchDispatchMode):
    """Do for all tensors what ``share_gpu`` does for a GPU's."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("c10d::").partition(".")[0]
        if not func.name().startswith("c10d::") or name not in STAGED:
            return func(*args, **(kwargs or {}))
        self.seen.add(name)
        return STAGED[name](*args, **(kwargs or {}))


def collectives(staged):
    """Return the results of each collective, and the names of those that went through the host."""
    rank = dist.get_rank()
    mine = torch.arange(4.0) + 10 * rank
    mode = ThroughHost()
    with mode if staged else nullcontext():
        total, first, both = mine.clone(), mine.clone(), torch.zeros(8)
        dist.all_reduce(total)
        dist.broadcast(first, src=1)
        dist.all_gather_into_tensor(both, mine)
        half, left, right = torch.zeros(2), torch.zeros(4), torch.zeros(4)
        dist.reduce_scatter_tensor(half, mine)
        dist.all_gather([left, right], mine)
        received = [1, 1] if rank == 0 else [3, 3]
        uneven = torch.zeros(sum(received))
        dist.all_to_all_single(uneven, mine, received, [1, 3])
        peer, asked = torch.zeros(4), torch.zeros(4)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, peer, 1 - rank), dist.P2POp(dist.isend, mine, 1 - rank)]
        ):
            work.wait()
        if rank == 0:
            dist.send(total, 1)
        else:
            dist.recv(asked, 0)
    results = [total, first, both, half, left, right, uneven, peer, asked]
    return [tensor.tolist() for tensor in results], mode.seen


def test_collectives_through_the_host_are_gloos():
    theirs = run_parallel(collectives, 2, False, timeout=60)
    ours = run_parallel(collectives, 2, True, timeout=60)
    assert [results for results, _ in ours] == [results for results, _ in theirs]
    assert len(ours[0][1]) == len(ours[1][1]) == 8, ours[0][1]
