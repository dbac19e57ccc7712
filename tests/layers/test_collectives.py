"""Each collective pair is its own transpose, which is what makes gradients right; and free on one rank."""

import pytest
import torch
import torch.distributed as dist
from trilith.layers import (
    copy_to_tensor,
    gather_from_tensor,
    gather_sequence,
    reduce_from_tensor,
    scatter_sequence,
    split_to_tensor,
)
from trilith.parallel_state import Layout, ParallelState
from trilith.testing import run_parallel

#: For each pair whether its input, and its output, is one tensor that all ranks hold alike.
PAIRS = {
    "copy_to_tensor": (copy_to_tensor, True, False),
    "reduce_from_tensor": (reduce_from_tensor, False, True),
    "split_to_tensor": (split_to_tensor, True, False),
    "gather_from_tensor": (gather_from_tensor, False, True),
    "gather_sequence": (gather_sequence, False, False),
    "scatter_sequence": (scatter_sequence, False, False),
}


def random(shape, seed, *, alike):
    own = 0 if alike else 1 + dist.get_rank()
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * seed + own))


def inner_product(a, b, *, alike):
    """Return the ranks' common inner product: once for tensors that are alike, else the sum over ranks."""
    value = (a * b).sum().detach()
    if alike:
        return float(value)
    dist.all_reduce(value)
    return float(value)


def products(name, dim):
    """Return ``<f(x), y>`` and ``<x, f*(y)>``, and the shape of ``f(x)`` for x of (2, 8, 12)."""
    pair, whole_in, whole_out = PAIRS[name]
    state = ParallelState.start(Layout.of(tensor=dist.get_world_size()))
    x = random((2, 8, 12), 1, alike=whole_in).requires_grad_()
    y = pair(x, state) if dim is None else pair(x, state, dim=dim)
    if name in ("reduce_from_tensor", "scatter_sequence"):
        y += 0  # as a residual is added in place to what a row-parallel layer gives
    seed = random(tuple(y.shape), 2, alike=whole_out)
    (grad,) = torch.autograd.grad(y, x, seed)
    assert grad.shape == x.shape
    if whole_out:
        copies = y.detach().clone()
        dist.broadcast(copies, 0)
        assert torch.equal(copies, y), "the ranks' copies differ"
    if whole_in:
        copies = grad.clone()
        dist.broadcast(copies, 0)
        assert torch.equal(copies, grad), "the ranks' gradients differ"
    return inner_product(y, seed, alike=whole_out), inner_product(x, grad, alike=whole_in), tuple(y.shape)


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize(
    ("name", "dim", "shape"),
    [
        ("copy_to_tensor", None, lambda n: (2, 8, 12)),
        ("reduce_from_tensor", None, lambda n: (2, 8, 12)),
        ("split_to_tensor", -1, lambda n: (2, 8, 12 // n)),
        ("split_to_tensor", 1, lambda n: (2, 8 // n, 12)),
        ("gather_from_tensor", -1, lambda n: (2, 8, 12 * n)),
        ("gather_from_tensor", 0, lambda n: (2 * n, 8, 12)),
        ("gather_sequence", None, lambda n: (2, 8 * n, 12)),
        ("scatter_sequence", None, lambda n: (2, 8 // n, 12)),
    ],
)
def test_backward_is_the_transpose_of_forward(name, dim, shape, tensor):
    for forward, backward, found in run_parallel(products, tensor, name, dim):
        assert found == shape(tensor)
        assert forward == pytest.approx(backward, rel=1e-12)
