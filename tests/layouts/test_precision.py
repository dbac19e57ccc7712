"""bf16 and float8 compute: close to fp32 in every layout, masters not rounded, the same bits twice."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.configs import MODELS, config
from support.layout_cases import axes
from support.short_training import (
    Case,
    build_rank,
    first_difference,
    outcome,
    outcomes,
    rank_batch,
    relative_differences,
    train_rank,
)
from trilith.parallel_state import Layout, ParallelState, engine, initialize
from trilith.recipes.sections import MemorySection
from trilith.testing import run_parallel

LAYOUTS = [Layout(), Layout.of(tensor=2, sequence=True), Layout.of(data=2, zero=2), Layout.of(pipeline=2)]
CONFIG = MODELS["llama"] | {"num_hidden_layers": 3}
#: FSDP casts the weights in all but the first, where trilith does.
CASTING = [Layout.of(pipeline=2), *(Layout.of(data=2, zero=zero) for zero in (0, 1, 2, 3))]
CASTING += [Layout.of(context=2), Layout.of(pipeline=2, data=2, zero=3)]
EVERY_KIND = {"embed", "layers.0.attention.qkv", "layers.2.mlp.down", "layers.1.mlp_norm", "norm"}


@pytest.fixture(scope="module")
def fp32():
    return run(Case(CONFIG, dtype=torch.float32))


def run(case):
    return outcome(run_parallel(train_rank, case.layout.world, case))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bf16_compute(layout, fp32):
    case = Case(CONFIG, layout, dtype=torch.float32, compute=torch.bfloat16)
    found = run(case)
    assert found.losses == pytest.approx(fp32.losses, abs=1e-2)
    # Further from fp32 than another order of sums is: it was computed in bf16.
    assert max(abs(a - b) for a, b in zip(found.losses, fp32.losses, strict=True)) > 1e-5
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


def dtypes_of_a_step(case):
    """Return the dtypes of weights and outputs in a step's forwards, for each module below the blocks."""
    state = ParallelState.start(case.layout)
    parts = build_rank(case, state)
    initialize(parts.model, case.seed, state=state)
    seen = {}

    def look(name, module, inputs, output):
        tensors = [*module.parameters(), *engine.tensors_in(output)]
        seen.setdefault(name, set()).update(one.dtype for one in tensors)

    wrapped = {parts.model, *parts.model.layers.values()}  # their weights are sharded again by then
    for name, module in parts.model.named_modules():
        if module not in wrapped and [*module.parameters()]:
            module.register_forward_hook(partial(look, name))
    parts.step(rank_batch(case, 0, state))
    return seen


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("layout", CASTING, ids=str)
def test_weights_and_outputs_have_the_chosen_dtype_in_every_module(layout, compute):
    case = Case(CONFIG, layout, dtype=torch.float32, compute=compute)
    found = run_parallel(dtypes_of_a_step, layout.world, case)
    assert {name for seen in found for name in seen} >= EVERY_KIND
    assert {dtype for seen in found for dtypes in seen.values() for dtype in dtypes} == {compute}


WIDE = config("held/llama", layers=2, vocab_size=96, intermediate_size=96, num_attention_heads=4)
CUTS = [Layout.of(**axes(cut)) for cut in ("tp2", "tp2-sp", "dp2-zero3", "cp2", "pp2")]
ONE = Case(WIDE, micro_batch=2)
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_layout_changes_what_rounding_to_float8_leaves_by_a_hundred_thousandth(scaling):
    """In fp64 all but float8's products is exact; without a common scale they would differ by percents."""
    one = replace(ONE, float8=scaling)
    alone, smaller, plain, frozen = outcomes([one, replace(one, micro_batch=1), ONE, replace(one, lora=LORA)])
    far = dict(relative_differences(alone, plain))
    assert max(far.values()) > 1e-2 and alone.losses == pytest.approx(plain.losses, rel=1e-2)
    assert first_difference(alone, smaller, tolerance=1e-5) is None
    cases = [replace(one, layout=layout) for layout in CUTS]
    *layouts, adapted = outcomes([*cases, replace(cases[1], lora=LORA)])
    for found in layouts:
        assert first_difference(alone, found, tolerance=1e-5) is None
    assert first_difference(frozen, adapted, tolerance=1e-5) is None


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_recomputed_activations_change_no_bit(scaling):
    one = replace(ONE, float8=scaling, layout=Layout.of(tensor=2, sequence=True))
    memories = [MemorySection(checkpointing="selective"), MemorySection(checkpointing="full")]
    plain, *forgetful = outcomes([one, *(replace(one, memory=memory) for memory in memories)])
    for found in forgetful:
        assert first_difference(plain, found, tolerance=0.0) is None


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_in_one_graph_a_layout_is_the_same(scaling):
    one = replace(ONE, float8=scaling, layout=Layout.of(tensor=2, sequence=True))
    plain, compiled = outcomes([one, replace(one, compiled="aot_eager")])
    assert first_difference(plain, compiled, tolerance=1e-6) is None


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_between_the_products_all_is_in_bf16(scaling):
    case = replace(ONE, float8=scaling, dtype=torch.float32, compute=torch.bfloat16)
    exact, found = outcomes([replace(ONE, dtype=torch.float32), case])
    assert found.losses == pytest.approx(exact.losses, rel=1e-2) and found.losses != exact.losses
    assert found.norms == pytest.approx(exact.norms, rel=0.1)
    assert {one.dtype for one in found.parameters.values()} == {torch.float32}
