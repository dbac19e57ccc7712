"""Loss scale, fp16 and the dtype of gradient sums: exact laws, in layouts."""

import pytest
import torch
from support.configs import TINIEST_LLAMA
from support.short_runs import built
from trilith.data import Batch
from trilith.layers import IGNORE
from trilith.parallel_state import Layout
from trilith.parallel_state.engine import local_data
from trilith.testing import run_parallel
from trilith.training import Precision, Step, TokenLoss

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
