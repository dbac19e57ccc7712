"""The router: scores, groups, biases, weights as transformers' DeepSeek has them; its losses and counts."""

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.mixtral import modeling_mixtral
from trilith.layers import Balancing, TopKRouter, set_auxiliary_losses, set_auxiliary_scale
from trilith.parallel_state import Layout, ParallelState, engine, initialize

E, K, D = 12, 3, 10


def inputs(rows=2, length=9):
    return torch.randn(rows, length, D, dtype=torch.float64, requires_grad=True)


def made(**changes):
    torch.manual_seed(1)
    return TopKRouter(D, E, K, **changes).double()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (3, 1)])
def test_sigmoid_scores_biases_and_groups_are_deepseek_v3s(groups, kept, normalize):
    config = transformers.DeepseekV3Config(
        hidden_size=D, n_routed_experts=E, num_experts_per_tok=K, n_group=groups, topk_group=kept,
        norm_topk_prob=normalize, routed_scaling_factor=2.5, moe_intermediate_size=4,
    )  # fmt: skip
    ours = TopKRouter(
        D, E, K, score="sigmoid", groups=groups, groups_kept=kept, normalize=normalize, scale=2.5,
        bias_corrected=True,
    )  # fmt: skip
    theirs = modeling_deepseek_v3.DeepseekV3MoE(config)
    bias = torch.rand(E)
    theirs.gate.weight.data.copy_(ours.weight.data)
    theirs.gate.e_score_correction_bias.copy_(bias)
    assert ours.bias is not None
    ours.bias.copy_(bias)
    x = torch.randn(2, 40, D)
    given = theirs.gate(x.flatten(0, 1))
    chosen, weights = (
        theirs.route_tokens_to_experts(given) if isinstance(given, Tensor) else (given[2], given[1])
    )
    mine, found = ours(x)
    order, other = found.flatten(0, 1).sort(-1), chosen.sort(-1)
    assert torch.equal(order.values, other.values)
    torch.testing.assert_close(
        mine.flatten(0, 1).gather(-1, order.indices), weights.gather(-1, other.indices), rtol=1e-5, atol=1e-7
    )


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
    assert watch.after_step() is not None and watch.after_step() is None


def test_biases_move_towards_even_loads_and_stay_where_a_step_is_skipped():
    ours = made(bias_corrected=True)
    watch, loads = Balancing(ours, rate=0.01), []
    torch.manual_seed(0)
    x = torch.randn(4, 64, D, dtype=torch.float64) + 0.5
    for _ in range(30):
        ours(x)[0].sum().backward()
        loads.append(watch.after_step().load)
    assert loads[0] > 1.5 and loads[-1] < 1.3 and ours.bias.grad is None
    before = ours.bias.clone()
    ours(x)[0].sum().backward()
    watch.after_step(updated=False)
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
        ours = TopKRouter(D, E, K, bias_corrected=True)
    ours.to_empty(device="cpu")
    initialize(ours, 3)
    assert ours.bias is not None and torch.equal(ours.bias, torch.zeros(E))
    ours.bias.data.fill_(1 / 3)
    for cast in (ours.bfloat16, ours.double, ours.half):
        assert cast().bias.dtype == torch.float32 and float(ours.bias[0]) == torch.tensor(1 / 3)
    assert not ours.bias.requires_grad and ours.weight.dtype == torch.float16
