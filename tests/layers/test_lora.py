"""LoRA on the parallel linears: what it computes, its declarations and its masks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trilith.layers import ColumnParallelLinear, Experts, RowParallelLinear, attach_expert_lora, attach_lora
from trilith.parallel_state import Layout, ParallelState
from trilith.parallel_state.engine import local_data
from trilith.testing import run_parallel


def test_an_adapter_adds_the_scaled_product_and_starts_at_nothing():
    layer = ColumnParallelLinear(6, {"q": 8, "k": 4})
    plain = layer(x := torch.randn(3, 6))
    attach_lora(layer, r=2, alpha=8, outputs=["q"])
    assert all(torch.equal(a, b) for a, b in zip(plain, layer(x), strict=True))
    a = layer.q.lora_A.detach()
    assert a.shape == (2, 6) and 0.2 < float(a.abs().max()) <= 1 / 6**0.5
    nn.init.normal_(layer.q.lora_B)
    q, k = layer(x)
    torch.testing.assert_close(q, plain[0] + 4 * (x @ a.T @ layer.q.lora_B.T))
    assert torch.equal(k, plain[1])
    row = RowParallelLinear(6, 5)
    attach_lora(row, r=4, alpha=8, rslora=True)
    before = row(x).detach()
    nn.init.normal_(row.lora_B)
    torch.testing.assert_close(row(x), before + 4 * (x @ row.lora_A.T @ row.lora_B.T))


def test_outputs_attached_together_share_one_a():
    layer = ColumnParallelLinear(6, {"q": 8, "k": 4})
    attach_lora(layer, r=2, alpha=2)
    assert sorted(dict(layer.named_parameters())) == sorted(
        ["q.weight", "q.bias", "k.weight", "k.bias", "lora_A", "q.lora_B", "k.lora_B"]
    )


def masks(sequence):
    """Return the dropout masks of the adapters of both kinds of linear, and the generator's next number."""
    state = ParallelState.start(Layout.of(tensor=2, sequence=sequence))
    column, row = ColumnParallelLinear(64, 2, state=state), RowParallelLinear(128, 2, state=state)
    for layer in (column, row):
        attach_lora(layer, r=64, alpha=64, dropout=0.5)
        local_data(layer.lora_A).copy_(torch.eye(64, 128)[:, :64])
    torch.manual_seed(5)
    seen = []
    with torch.no_grad():
        for layer, adapter in ((column, column.adapters[0]), (row, row.adapters[0])):
            local_data(layer.lora_B).fill_(1.0)
            (change,) = adapter(torch.eye(64)).values()
            seen.append(change[:, 0].clone())
    return seen[0], seen[1], int(torch.randint(2**62, ()))


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_masks_agree_where_the_input_is_shared_and_differ_where_it_is_cut(sequence):
    (column, row, after), (other_column, other_row, other_after) = run_parallel(masks, 2, sequence)
    assert torch.equal(column, other_column) and not torch.equal(row, other_row)
    assert after == other_after
    for mask in (column, row, other_row):
        assert set(mask.tolist()) == {0.0, 2.0}


def test_dropout_of_an_adapter_is_for_training():
    layer = RowParallelLinear(6, 5, False)
    attach_lora(layer, r=2, alpha=2, dropout=0.5)
    nn.init.normal_(layer.eval().lora_B)
    x = torch.randn(4, 6)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight + layer.lora_B @ layer.lora_A))


def test_an_adapter_of_experts_adds_the_scaled_product_of_each_expert():
    experts = Experts(3, 6, 8).double()
    x, counts = torch.randn(7, 6, dtype=torch.float64), [2, 0, 5]
    plain = experts(x, counts)
    attach_expert_lora(experts, ["gate", "up"], r=2, alpha=8)
    attach_expert_lora(experts, ["down"], r=4, alpha=8, rslora=True)
    experts.double()
    assert torch.equal(experts(x, counts), plain)
    for name, one in experts.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(one)
    merged = Experts(3, 6, 8).double()
    with torch.no_grad():
        for output, a in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down")):
            factors = getattr(experts, f"lora_B_{output}") @ getattr(experts, f"lora_A_{a}")
            getattr(merged, output).copy_(getattr(experts, output) + 4 * factors)
    torch.testing.assert_close(experts(x, counts), merged(x, counts))
    assert float((experts(x, counts) - plain).detach().abs().max()) > 1e-2
