"""Mixtures of experts: against a plain loop over tokens, and on any ranks against one device, in fp64."""

import pytest
import torch
import torch.distributed as dist
from support.layers import made_alike, mixture
from torch import Tensor
from torch.nn import functional as F
from trilith.layers import ClampedExperts, Experts, MoE, TopKRouter, grouped_mm
from trilith.layers.experts import experts as stacks
from trilith.layers.experts import grouped_matmul
from trilith.layers.experts.grouped_matmul import by_kernel
from trilith.parallel_state import Layout, Normal, ParallelState, declarations
from trilith.parallel_state.engine import local_data
from trilith.parallel_state.state import fsdp_mesh
from trilith.testing import run_parallel
from trilith.testing.operators import Operators

D = 12


def by_token(moe, x_BSD):
    weights, chosen = moe.router(x_BSD)
    rows = []
    for x, w, experts in zip(x_BSD.flatten(0, 1), weights.flatten(0, 1), chosen.flatten(0, 1), strict=True):
        y = torch.zeros_like(x)
        for weight, e in zip(w, experts.tolist(), strict=True):
            inner = moe.experts.act(moe.experts.gate[e] @ x) * (moe.experts.up[e] @ x)
            y = y + weight * (moe.experts.down[e] @ inner)
        rows.append(y)
    return torch.stack(rows).view_as(x_BSD)


def test_on_one_device_it_is_its_definition():
    moe = mixture(None)
    x = torch.randn(2, 7, D, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    y, wanted = moe(x), by_token(moe, other)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-14)
    y.pow(2).sum().backward()
    found = {name: p.grad for name, p in moe.named_parameters()}
    moe.zero_grad()
    wanted.pow(2).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-10, atol=1e-14)
    for name, p in moe.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-10, atol=1e-14)
    assert float(moe.experts.up.grad[3].abs().max()) == 0.0  # nobody chose it


#: Rows of each data rank: unevenly many, one has none.
ROWS = [3, 0, 1, 2]


def expert_rank(layout):
    """Each rank its own rows; an expert's gradients are whole in its expert group, the router's a part."""
    state = ParallelState.start(layout)
    whole, mine = made_alike(mixture, state)
    assert isinstance(mine, MoE) and isinstance(whole, MoE)
    whole.router.row_scale = mine.router.row_scale = 1 / sum(ROWS)
    x = torch.randn(sum(ROWS), 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    first = sum(ROWS[: state.data_index])
    here = slice(first, first + ROWS[state.data_index])
    x_whole, x_mine = x.clone().requires_grad_(), x[here].clone().requires_grad_()
    y_whole, y_mine = whole(x_whole), mine(x_mine)
    torch.testing.assert_close(y_mine, y_whole[here], rtol=1e-11, atol=1e-14)
    y_whole.pow(2).sum().backward()
    y_mine.pow(2).sum().backward()
    assert x_mine.grad is not None and x_whole.grad is not None
    torch.testing.assert_close(x_mine.grad, x_whole.grad[here], rtol=1e-11, atol=1e-14)
    stated, others = declarations(mine), dict(whole.named_parameters())
    for name, parameter in mine.named_parameters():
        grad = parameter.grad
        if stated[name].buffer:
            assert grad is None, name
            continue
        assert grad is not None, name
        mesh = fsdp_mesh(state, experts=stated[name].experts)
        grad = local_data(grad)
        for axis in range(mesh.ndim):  # FSDP's work
            dist.all_reduce(grad, group=mesh.get_group(axis))
        if (replicas := state.replica_group(experts=stated[name].experts)) is not None:
            dist.all_reduce(grad, group=replicas)
        wanted = others[name].grad
        assert wanted is not None
        box = stated[name].box(layout, state.at)
        torch.testing.assert_close(grad, wanted[box.slices], rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize(
    "layout",
    [Layout.of(data=4, expert=4), Layout.of(data=4, expert=2), Layout.of(data=4, expert=2, zero=1)],
    ids=str,
)
def test_dealt_out_over_ranks_it_is_the_same(layout):
    run_parallel(expert_rank, 4, layout)


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 1e-5),
        ("cpu", torch.bfloat16, 0.02),
        pytest.param(
            "cuda",
            torch.bfloat16,
            0.02,
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ),
    ],
)
def test_the_kernel_has_the_numbers_of_the_loop(device, dtype, tolerance):
    torch.manual_seed(0)
    counts = [5, 0, 40, 19]
    x = torch.randn(64, 32, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(4, 48, 32, device=device, dtype=dtype, requires_grad=True)
    y = by_kernel(x, w, counts)
    loop = torch.cat([F.linear(rows, one) for rows, one in zip(x.split(counts), w, strict=True)])
    if device == "cuda":
        assert type(grouped_mm(x, w, counts).grad_fn) is type(y.grad_fn) is not type(loop.grad_fn)
    torch.testing.assert_close(y, loop, rtol=tolerance, atol=tolerance)
    found = torch.autograd.grad(y.sum(), (x, w))
    for one, other in zip(found, torch.autograd.grad(loop.sum(), (x, w)), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=5 * tolerance)


def test_a_rank_without_rows_asks_no_kernel_and_has_gradients_of_zeros(monkeypatch):
    monkeypatch.setattr(grouped_matmul, "has_kernel", lambda *_: True)
    x, w = torch.empty(0, 16, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    with Operators() as seen:
        y = grouped_mm(x, w, grouped_matmul.GroupSizes(torch.zeros(3, dtype=torch.int32)))
        y.sum().backward()
    assert y.shape == (0, 8) and x.grad is not None and w.grad is not None and not w.grad.any()
    assert not [name for name in seen.names if "grouped_mm" in name or "scalar" in name]


@pytest.mark.parametrize("clamped", [False, True])
def test_a_mixture_on_one_rank_of_experts_reads_nothing_from_a_device_with_the_kernel(clamped, monkeypatch):
    """Forward and backward ask no number of the device where torch's kernel multiplies the groups."""
    read = []
    for module in (grouped_matmul, stacks):
        monkeypatch.setattr(module, "has_kernel", lambda *_: True)
    monkeypatch.setattr(grouped_matmul.GroupSizes, "sizes", property(lambda self: read.append("sizes")))
    monkeypatch.setattr(Tensor, "tolist", lambda self: read.append("tolist"))
    monkeypatch.setattr(Tensor, "item", lambda self: read.append("item"))
    made = ClampedExperts(4, 8, 16, initial=Normal(0.1)) if clamped else Experts(4, 8, 16)
    mixture = MoE(TopKRouter(8, 4, 2), made)
    x = torch.randn(2, 8, 8, requires_grad=True)
    with Operators() as seen:
        mixture(x).sum().backward()
    assert not read
    assert not {"aten::_local_scalar_dense", "aten::bincount", "aten::nonzero"} & {*seen.names}
    assert "aten::_grouped_mm" in seen.names
