"""bf16, fp16 and float8 compute in every layout: close to fp32; the loss scale; the dtype of sums."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.configs import MODELS, TINIEST_LLAMA, config
from support.layout_cases import axes
from support.short_runs import built
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
from trilith.data import Batch
from trilith.layers import IGNORE
from trilith.parallel_state import Layout, ParallelState, engine, initialize
from trilith.parallel_state.engine import local_data
from trilith.recipes.sections import MemorySection
from trilith.testing import run_parallel
from trilith.training import Precision, Step, TokenLoss

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


SAMPLES, LENGTH = 4, 8


def gradients(model, precision, scale, only=None, schedule="1f1b"):
    """Return loss and this rank's gradients of a step at this scale. ``only``: the data rank that counts."""
    tokens = torch.randint(131, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    each = SAMPLES // model.state.layout.data
    mine = slice(model.state.data_index * each, (model.state.data_index + 1) * each)
    ids, labels = tokens[mine, :-1].contiguous(), tokens[mine, 1:].clone()
    if only not in (None, model.state.data_index):
        labels[:] = IGNORE
    micro = 1 if model.state.layout.pipeline > 1 else each
    step = Step(model, TokenLoss(model), micro_batch=micro, schedule=schedule)
    loss = float(step(Batch(ids, labels), scale=scale))
    found = {name: local_data(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss, found


FP64 = Precision(torch.float64, torch.float64, torch.float64)
HALF = Precision(torch.float32, torch.float16, torch.float32)
PLAIN = [("1f1b", layout) for layout in (Layout.of(tensor=2, sequence=True), Layout.of(pipeline=2))]
LOOP = Layout(pipeline=2, virtual_stages=2)
SHAPED = Layout(pipeline=2, virtual_stages=2, v_shape=True)
SEVERAL = [
    pytest.param("interleaved", LOOP, marks=pytest.mark.slow),
    pytest.param("interleaved-zero-bubble", LOOP, marks=pytest.mark.slow),
    ("zbv", SHAPED),
    pytest.param("dualpipev", SHAPED, marks=pytest.mark.slow),
]
DEEP = {**TINIEST_LLAMA, "num_hidden_layers": 4}


def at_two_scales(layout, schedule):
    """Return names whose gradients at scale 4096, divided by it, differ in any bit from those at scale 1."""
    model = built(layout, FP64, DEEP)
    (loss, plain), (scaled_loss, scaled) = (
        gradients(model, FP64, scale, schedule=schedule) for scale in (1.0, 4096.0)
    )
    assert scaled_loss == loss and plain.keys() == scaled.keys() and plain
    assert all(bool(grad.any()) for grad in plain.values() if grad.numel())
    return [name for name in plain if not torch.equal(scaled[name] / 4096, plain[name])]


@pytest.mark.parametrize(
    ("schedule", "layout"), [*PLAIN, ("1f1b", Layout.of(data=2, zero=3)), *SEVERAL], ids=str
)
def test_the_scale_changes_no_bit_of_loss_or_gradients(schedule, layout):
    assert run_parallel(at_two_scales, layout.world, layout, schedule) == [[]] * layout.world


def errors_of_half(layout, schedule):
    """Return the worst relative error of fp16's gradients against fp64's, at scale 2^10 and at 2^-16."""
    _, exact = gradients(built(layout, FP64, DEEP), FP64, 1.0, schedule=schedule)
    model = built(layout, HALF, DEEP)

    def worst(scale):
        _, found = gradients(model, HALF, scale, schedule=schedule)
        assert {grad.dtype for grad in found.values()} == {torch.float32}
        return max(
            float((found[name] / scale - grad).norm() / grad.norm())
            for name, grad in exact.items()
            if grad.numel()
        )

    return worst(2.0**10), worst(2.0**-16)


@pytest.mark.parametrize(("schedule", "layout"), [*PLAIN, ("1f1b", Layout.of(data=2)), *SEVERAL], ids=str)
def test_fp16_gradients_keep_their_digits_by_the_scale(schedule, layout):
    for good, lost in run_parallel(errors_of_half, layout.world, layout, schedule):
        assert good < 0.01 and lost > 10 * good


def sums_of_gradients(layout, dtype):
    """Count elements that are not the ranks' sum in ``dtype``, and those that differ in another dtype."""
    wide, narrow = torch.float32, torch.bfloat16
    precision = Precision(wide, narrow, dtype)
    model = built(layout, precision)
    _, both = gradients(model, precision, 1.0)
    # Alone a rank's mean is over half the tokens, so its gradients are twice as large, exactly.
    alone = [gradients(model, precision, 1.0, only=rank)[1] for rank in (0, 1)]
    wrong = different = 0
    for name, found in both.items():
        sums = {
            one: ((alone[0][name].to(one) + alone[1][name].to(one)).to(wide) / 2) for one in (wide, narrow)
        }
        wrong += int((found != sums[dtype]).sum())
        different += int((sums[wide] != sums[narrow]).sum())
    return wrong, different


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [Layout.of(data=2), Layout.of(data=2, zero=3)], ids=str)
def test_gradients_are_summed_in_the_chosen_dtype(layout, dtype):
    for wrong, different in run_parallel(sums_of_gradients, 2, layout, dtype):
        assert wrong == 0 and different > 100
