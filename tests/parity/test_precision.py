"""bf16 compute over fp32 masters: close to fp32 in every layout, masters not rounded, the same bits twice."""

from __future__ import annotations

import pytest
import torch
from trilith.parallel_state import Layout
from trilith.testing import run_parallel
from trilith.testing.short_training import Case, Outcome, first_difference, outcome, train_rank
from trilith.testing.tiny_models import MODELS

LAYOUTS = [
    Layout(),
    Layout.of(tensor=2, sequence=True),
    Layout.of(data=2, zero=2),
    Layout.of(pipeline=2),
]


CONFIG = MODELS["llama"] | {"num_hidden_layers": 3}


@pytest.fixture(scope="module")
def fp32() -> Outcome:
    return run(Case(CONFIG, dtype=torch.float32))


def run(case: Case) -> Outcome:
    return outcome(run_parallel(train_rank, case.layout.world, case))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bf16_compute(layout: Layout, fp32: Outcome) -> None:
    case = Case(CONFIG, layout, dtype=torch.float32, compute=torch.bfloat16)
    found = run(case)
    assert found.losses == pytest.approx(fp32.losses, abs=1e-2) and found.losses != fp32.losses
    assert found.norms == pytest.approx(fp32.norms, rel=0.05)
    for kind in (found.initial, found.gradients, found.parameters):
        assert {tensor.dtype for tensor in kind.values()} == {torch.float32}
    assert all(torch.equal(found.initial[name], fp32.initial[name]) for name in fp32.initial)
    # A master that had been through bf16 would hold no more than its 8 bits.
    moved = found.parameters["layers.2.mlp.down.weight"]
    assert float((moved != moved.bfloat16().float()).float().mean()) > 0.9
    if layout.sequence:  # one layout of two ranks is enough to see that nothing depends on time
        again = run(case)
        assert first_difference(found, again, tolerance=0.0) is None, "two runs must be equal bit for bit"


FP32_LAYOUTS = [Layout.of(pipeline=2, data=2, zero=1)]


@pytest.mark.parametrize("layout", FP32_LAYOUTS, ids=str)
def test_fp32_is_close_and_the_same_twice(layout: Layout, fp32: Outcome) -> None:
    case = Case(CONFIG, layout, dtype=torch.float32)
    found = run(case)
    assert found.losses == pytest.approx(fp32.losses, rel=1e-5)
    assert first_difference(found, run(case), tolerance=0.0) is None
