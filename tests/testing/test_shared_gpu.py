"""Collectives that travel through the host, here those of CPU tensors: they return what gloo's return."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from support.shared_gpu import STAGED
from torch.utils._python_dispatch import TorchDispatchMode
from trilith.testing import run_parallel


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
    return [one.tolist() for one in results], mode.seen


def test_collectives_through_the_host_are_gloos():
    theirs = run_parallel(collectives, 2, False, timeout=60)
    ours = run_parallel(collectives, 2, True, timeout=60)
    assert [results for results, _ in ours] == [results for results, _ in theirs]
    assert len(ours[0][1]) == len(ours[1][1]) == 8, ours[0][1]
