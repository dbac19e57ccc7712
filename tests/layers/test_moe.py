"""Mixtures of experts and their routers: against loops, transformers, and one device, in fp64."""

import pytest
import torch
from support.layers import made_alike, mixture
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral import modeling_mixtral
from trilith.layers import (
    Balancing,
    ClampedExperts,
    Experts,
    MoE,
    TopKRouter,
    grouped_mm,
    set_auxiliary_losses,
    set_auxiliary_scale,
    uncounted,
)
from trilith.layers.experts import experts as stacks
from trilith.layers.experts import grouped_matmul
from trilith.layers.experts.grouped_matmul import by_kernel
from trilith.parallel_state import Layout, Normal, ParallelState, engine, initialize
from trilith.testing import run_parallel
from trilith.testing.operators import Operators

D = 12


#: Rows of each data rank: unevenly many, one has none.
ROWS = [3, 0, 1, 2]


def expert_rank(layout):
    """Each rank has rows of its own; layouts of whole models compare the weights' gradients."""
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


E, K, WIDTH = 12, 3, 10


def inputs(rows=2, length=9):
    return torch.randn(rows, length, WIDTH, dtype=torch.float64, requires_grad=True)


def made(**changes):
    torch.manual_seed(1)
    return TopKRouter(WIDTH, E, K, **changes).double()


def test_softmax_groups_count_as_their_best_expert():
    ours, x = made(groups=4, groups_kept=2), inputs()
    _, found = ours(x)
    scores = torch.nn.functional.linear(x, ours.weight).softmax(-1)
    best = scores.unflatten(-1, (4, 3)).amax(-1).topk(2, -1).indices
    assert all(
        set(experts.tolist()) <= {3 * g + e for g in groups.tolist() for e in range(3)}
        for experts, groups in zip(found.flatten(0, 1), best.flatten(0, 1), strict=True)
    )


def test_the_balance_loss_of_one_row_is_transformers():
    ours, x = made(balance=0.7), inputs(rows=1)
    x_theirs, weight = x.detach().clone().requires_grad_(), ours.weight.detach().clone().requires_grad_()
    logits = torch.nn.functional.linear(x_theirs, weight)
    theirs = modeling_mixtral.load_balancing_loss_func((logits.flatten(0, 1),), E, K)
    (0.7 * theirs).backward()
    weights, _ = ours(x)
    (weights.sum() * 0).backward()
    torch.testing.assert_close(x.grad, x_theirs.grad, rtol=1e-6, atol=1e-9)  # theirs counts in fp32
    torch.testing.assert_close(ours.weight.grad, weight.grad, rtol=1e-6, atol=1e-9)
    found = Balancing(ours).after_step()
    assert found is not None and found.balance == pytest.approx(float(theirs.detach()), rel=1e-6)


def test_losses_are_means_over_rows_whatever_the_micro_batches():
    x = inputs(rows=4).detach()

    def gradient(parts, scale):
        router = made(balance=0.3, z_loss=0.01)
        watch = Balancing(router)
        set_auxiliary_scale(router, scale)
        for part in x.chunk(parts):
            (router(part)[0].sum() * 0).backward()
        assert router.weight.grad is not None
        return router.weight.grad, watch.after_step()

    (whole, once), (pieces, later) = gradient(1, None), gradient(4, 1 / 4)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-15)
    assert later.load == once.load and later.balance == pytest.approx(once.balance, rel=1e-12)
    wanted = torch.nn.functional.linear(x, made().weight).logsumexp(-1).square().mean()
    assert once.z_loss == pytest.approx(float(wanted.detach()), rel=1e-12)


@pytest.mark.parametrize(
    ("asked", "sums"),
    [({}, 0), ({"z_loss": 0.1}, 0), ({"balance": 0.1}, 1), ({"bias_corrected": True}, 1)],
    ids=str,
)
def test_context_ranks_add_up_counts_for_a_balance_loss_that_somebody_asks_for(asked, sums, monkeypatch):
    sent = []
    monkeypatch.setattr(engine, "all_reduce", lambda counts, group: sent.append(counts) or counts)
    ours = made(state=ParallelState.stand_in(Layout.of(context=2), 0), **asked)
    ours(inputs())[0].sum().backward()
    assert len(sent) == sums and ours.weight.grad.isfinite().all()
    found = Balancing(ours).after_step()
    assert found.load > 1 and found.z_loss > 0 and (found.balance is not None) == bool(sums)


def test_what_a_trace_routes_is_not_counted_and_what_was_counted_stays():
    ours, x = made(), inputs()
    ours(x)[0].sum().backward()
    counted = ours.sums
    with uncounted(ours):
        ours(x)[0].sum().backward()
        assert torch.equal(ours.sums, counted)  # from nothing
    assert ours.sums is counted


def test_without_a_state_tallies_stay_on_the_model_s_device():
    ours = made()
    ours.sums = torch.zeros(E + 3, dtype=torch.float64, device="meta")
    assert Balancing(ours).summed().is_meta


def test_z_loss_alone_has_the_gradient_of_its_formula():
    ours, x = made(), inputs()
    set_auxiliary_losses(ours, z_loss=0.5)
    (ours(x)[0].sum() * 0).backward()
    x_again, again = x.detach().clone().requires_grad_(), made()
    z = torch.nn.functional.linear(x_again, again.weight).logsumexp(-1).square().mean()
    (0.5 * z).backward()
    torch.testing.assert_close(x.grad, x_again.grad, rtol=1e-12, atol=1e-15)


def test_what_is_computed_again_counts_once_and_without_gradients_not_at_all():
    ours, x = made(balance=1.0), inputs()
    watch = Balancing(ours)
    with torch.no_grad():
        ours(x)
    assert watch.after_step() is None
    checkpoint(lambda x: ours(x)[0], x, use_reentrant=False).sum().backward()
    assert ours.sums is not None and float(ours.sums[:E].sum()) == 2 * 9 * K
    counted = ours.sums
    assert watch.after_step() is not None and watch.after_step() is None
    # Nothing before a frozen router is trained; what comes after it has it computed again.
    after = torch.ones((), dtype=x.dtype, requires_grad=True)
    ours.requires_grad_(False)
    checkpoint(lambda x: (ours(x)[0] * after).exp(), x.detach(), use_reentrant=False).sum().backward()
    assert ours.sums is not None and torch.equal(ours.sums, counted)


def test_biases_move_towards_even_loads_and_stay_where_a_step_is_skipped_or_the_router_frozen():
    ours = made(bias_corrected=True)
    watch, loads = Balancing(ours, rate=0.01), []
    torch.manual_seed(0)
    x = torch.randn(4, 64, WIDTH, dtype=torch.float64) + 0.5
    for _ in range(30):
        ours(x)[0].sum().backward()
        loads.append(watch.after_step().load)
    assert loads[0] > 1.5 and loads[-1] < 1.3 and ours.bias.grad is None
    before = ours.bias.clone()
    ours(x)[0].sum().backward()
    watch.after_step(updated=False)
    ours.requires_grad_(False)(x.requires_grad_())[0].sum().backward()
    watch.after_step()
    assert torch.equal(ours.bias, before) and before.any()


def test_a_bias_moves_up_where_an_expert_had_fewer_tokens_than_the_mean():
    ours, x = made(bias_corrected=True), inputs()
    _, chosen = ours(x)
    ours(x)[0].sum().backward()
    Balancing(ours, rate=0.25).after_step()
    counts = torch.bincount(chosen.flatten(), minlength=E).double()
    assert ours.bias is not None and len(set(counts.tolist())) > 2
    assert ours.bias.tolist() == (0.25 * (counts.mean() - counts).sign()).tolist()


def test_biases_stay_fp32_whatever_the_models_dtype():
    with torch.device("meta"):
        ours = TopKRouter(WIDTH, E, K, bias_corrected=True)
    ours.to_empty(device="cpu")
    initialize(ours, 3)
    assert ours.bias is not None and torch.equal(ours.bias, torch.zeros(E))
    ours.bias.data.fill_(1 / 3)
    for cast in (ours.bfloat16, ours.double, ours.half):
        assert cast().bias.dtype == torch.float32 and float(ours.bias[0]) == torch.tensor(1 / 3)
    assert not ours.bias.requires_grad and ours.weight.dtype == torch.float16
