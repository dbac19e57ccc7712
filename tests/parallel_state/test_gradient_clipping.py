"""Sums of partial gradients, norms and clipping: torch's own on one device, each element once on many."""

import pytest
import torch
from torch import nn
from trilith.layers import ColumnParallelLinear, RMSNorm
from trilith.parallel_state import Layout, ParallelState, clip_gradients, finalize_gradients, gradient_norm
from trilith.parallel_state.engine import local_data
from trilith.testing import run_parallel


def with_gradients(dtype=torch.float64):
    """Return layers of which the second one may be complex."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5).double(), nn.Linear(5, 3, dtype=dtype))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("limit", [0.5, 1e6], ids=["biting", "idle"])
def test_on_one_device_it_is_torchs_clipping(limit, dtype):
    ours, theirs = with_gradients(dtype), with_gradients(dtype)
    norm = clip_gradients(ours, limit)
    wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    assert float(norm) == pytest.approx(float(wanted), rel=1e-14)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-13, atol=0)


@pytest.mark.parametrize("limit", [0.0, 0.5], ids=["no-clipping", "clipping"])
def test_gradients_of_a_multiple_of_the_loss_are_divided_by_it(limit):
    scaled, plain = with_gradients(), with_gradients()
    for parameter in scaled.parameters():
        parameter.grad.mul_(1024)
    assert torch.equal(clip_gradients(scaled, limit, loss_scale=1024), clip_gradients(plain, limit))
    for mine, other in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_a_model_without_gradients_has_norm_zero():
    assert float(gradient_norm(nn.Linear(3, 2))) == 0.0
    assert float(clip_gradients(nn.Linear(3, 2), 1.0)) == 0.0


def test_the_norm_of_many_bf16_gradients_is_that_of_fp64_to_fp32_s_rounding():
    torch.manual_seed(0)
    module = ColumnParallelLinear(2048, 1025).bfloat16()
    for one in module.parameters():
        one.grad = torch.randn_like(one)
    exact = torch.cat([one.grad.double().flatten() for one in module.parameters() if one.grad is not None])
    norm = gradient_norm(module)
    assert norm.dtype == torch.float32
    assert abs(norm.double() / exact.norm() - 1) < 1e-5  # torch's own kernel is 5.3e-5 off


def gradients_where_one_rank_has_none():
    """Use norms on tensor rank 1 alone, one for nothing, and another one nowhere; return all gradients."""
    state = ParallelState.start(Layout.of(tensor=2, sequence=True))
    model = nn.ModuleDict({name: RMSNorm(4, state=state) for name in ("some", "zero", "unused")})
    if state.at.tensor == 1:
        x = torch.arange(8.0).view(1, 2, 4)
        (model["some"](x).square().sum() + 0 * model["zero"](x).sum()).backward()
    finalize_gradients(model, state=state)
    gradients = [parameter.grad for parameter in model.parameters()]
    return [None if gradient is None else local_data(gradient) for gradient in gradients]


def test_a_rank_without_a_partial_gradient_gets_the_sum_of_the_others():
    (first, zero, unused), (second, _, _) = run_parallel(gradients_where_one_rank_has_none, 2)
    assert first is not None and torch.equal(first, second) and bool(first.any())
    assert zero is not None and not zero.any()  # an optimizer moves its copies alike
    assert unused is None
