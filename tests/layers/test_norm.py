"""Norms: torch's own on one device; under sequence parallelism each rank's gradient is a part."""

import pytest
import torch
import torch.distributed as dist
from support.compare_layers import compare_with_one_device
from torch import nn
from trilith.layers import LayerNorm, RMSNorm
from trilith.parallel_state import Layout, ParallelState, declarations
from trilith.testing import run_parallel


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_on_one_device_it_is_torchs(kind, dtype):
    ours = (RMSNorm if kind == "RMSNorm" else LayerNorm)(12, 1e-3).to(dtype)
    theirs = (nn.RMSNorm if kind == "RMSNorm" else nn.LayerNorm)(12, 1e-3, dtype=dtype)
    for p in ours.parameters():
        nn.init.normal_(p, 0.5)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 12, dtype=dtype)
    ours(x).pow(2).sum().backward()
    theirs(x).pow(2).sum().backward()
    assert ours(x).dtype == dtype and torch.equal(ours(x), theirs(x))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_a_weight_starts_at_one_and_a_bias_at_zero():
    norm = LayerNorm(5)
    assert norm.weight.tolist() == [1.0] * 5 and norm.bias.tolist() == [0.0] * 5


def test_bf16_is_normalised_in_fp32():
    """The mean square of 4096 bf16 numbers, summed in bf16, would be off by percents."""
    x = (1 + torch.rand(4, 4096)).to(torch.bfloat16)
    exact = torch.nn.functional.rms_norm(x.double(), (4096,), eps=1e-6)
    with torch.no_grad():
        found = RMSNorm(4096).to(torch.bfloat16)(x)
    assert float((found - exact).abs().max() / exact.abs().max()) < 2**-8


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_are_parts_exactly_where_tokens_are_split(sequence):
    state = ParallelState.stand_in(Layout.of(tensor=2, sequence=sequence))
    for stated in declarations(LayerNorm(4, state=state)).values():
        assert stated.partial == (("tensor",) if sequence else ())


def both_norms(sequence):
    state = ParallelState.start(Layout.of(tensor=dist.get_world_size(), sequence=sequence))
    torch.set_default_dtype(torch.float64)
    between = 1 if sequence else None
    torch.manual_seed(0)
    x = torch.randn(2, 8, 12)

    def make(kind, s):
        norm = kind(12, state=s)
        for p in norm.parameters():
            (p if s is None else p.to_local()).data.add_(torch.linspace(-0.5, 0.5, 12))
        return norm

    def rms(s):
        return make(RMSNorm, s)

    def layer(s):
        return make(LayerNorm, s)

    return [
        compare_with_one_device(norm, x, state, input_dim=between, output_dim=between)
        for norm in (rms, layer)
    ]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_in_parts_it_equals_one_device(tensor, sequence):
    for worst in run_parallel(both_norms, tensor, sequence):
        assert max(worst) < 1e-13
