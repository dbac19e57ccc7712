"""The edges of a training step: batches in which little or nothing counts, and what no step can do."""

import re
from typing import Any, cast

import pytest
import torch
from support.configs import TINIEST_LLAMA
from support.families import model_of
from support.short_runs import built
from trilith.data import Batch
from trilith.layers import IGNORE
from trilith.parallel_state import BadInput, Layout, gradient_norm, initialize
from trilith.parallel_state.engine import local_data
from trilith.testing import RankError, run_parallel
from trilith.training import Precision, Step, TokenLoss

FP64 = Precision(torch.float64, torch.float64, torch.float64)
SAMPLES, LENGTH = 4, 8


def whole_batch():
    tokens = torch.randint(131, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def step_with(layout, counting):
    """Run a step in which only these samples count: loss, gradient norm, whether all gradients are zero."""
    model = built(layout, FP64)
    ids, labels = whole_batch()
    for sample in set(range(SAMPLES)) - set(counting):
        labels[sample] = IGNORE
    each = SAMPLES // layout.data
    mine = slice(model.state.data_index * each, (model.state.data_index + 1) * each)
    step = Step(model, TokenLoss(model, label_smoothing=0.1), micro_batch=1)
    loss = float(step(Batch(ids[mine], labels[mine])))
    norm = float(gradient_norm(model, state=model.state))
    grads = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in grads)
    return loss, norm, not any(bool(local_data(grad).any()) for grad in grads if grad is not None)


LAYOUTS = [Layout.of(tensor=2), Layout.of(data=2), Layout.of(data=2, zero=2), Layout.of(pipeline=2)]
LAYOUTS.append(Layout.of(pipeline=2, data=2, zero=1))


@pytest.mark.parametrize("layout", [Layout(), *LAYOUTS], ids=str)
def test_a_step_in_which_no_label_counts_has_no_loss_and_no_gradient_F14(layout):
    for loss, norm, zero in run_parallel(step_with, layout.world, layout, []):
        assert (loss, norm, zero) == (0.0, 0.0, True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_samples_that_do_not_count_weigh_nothing_wherever_they_lie(layout):
    """All samples that count are on one data rank, in one micro-batch; the mean is over the step's tokens."""
    ((loss, norm, _),) = run_parallel(step_with, 1, Layout(), [1])
    assert loss > 1
    for found, found_norm, _ in run_parallel(step_with, layout.world, layout, [1]):
        assert (found, found_norm) == pytest.approx((loss, norm), rel=1e-12)


def model_alone():
    model = model_of(TINIEST_LLAMA, device="cpu", dtype=torch.float64)
    initialize(model, 3)
    return model


def test_on_one_device_a_step_needs_no_process_group_and_no_fsdp():
    ((expected, norm, _),) = run_parallel(step_with, 1, Layout(), [1])
    model, (ids, labels) = model_alone(), whole_batch()
    for sample in (0, 2, 3):
        labels[sample] = IGNORE
    step = Step(model, TokenLoss(model, label_smoothing=0.1), micro_batch=1)
    assert float(step(Batch(ids, labels))) == expected
    assert float(gradient_norm(model)) == pytest.approx(norm, rel=1e-12)


def stale_on_the_last_rank(layout):
    """Return what a second step says if only the other ranks dropped their gradients, and whether a third
    step, after gradients of zeros, has the loss and the gradients of the first.
    """
    model, batch = built(layout, FP64), Batch(*whole_batch())
    step = Step(model, TokenLoss(model), micro_batch=1)

    def numbers():
        return float(step(batch)), float(gradient_norm(model, state=model.state))

    first = numbers()
    if model.state.rank != layout.world - 1:
        model.zero_grad()
    with pytest.raises(BadInput) as caught:
        step(batch)
    model.zero_grad(set_to_none=False)
    return str(caught.value), numbers() == first


@pytest.mark.parametrize("layout", [Layout(), Layout.of(data=2, zero=3), Layout.of(pipeline=2)], ids=str)
def test_every_rank_refuses_the_gradients_of_an_earlier_step_and_zeros_are_none(layout):
    for said, alike in run_parallel(stale_on_the_last_rank, layout.world, layout):
        assert said.startswith("step: gradients: expected none, or zeros, before a step") and alike
        assert "optimizer.zero_grad()" in said and "model.zero_grad() also" in said


IDS = torch.arange(16).view(2, 8)
BAD_BATCHES = {
    "a tuple": ((IDS, IDS), "batch: expected a Batch, found tuple"),
    "a list": (Batch(cast(Any, IDS.tolist()), IDS), "input_ids: expected int64 .* found list"),
    "one row without its dim": (Batch(IDS[0], IDS[0]), r"input_ids: .* found int64 of shape \[8\]"),
    "no row": (Batch(IDS[:0], IDS[:0]), r"input_ids: .* at least 1 each, .* found int64 of shape \[0, 8\]"),
    "no token": (Batch(IDS[:, :0], IDS[:, :0]), r"input_ids: .* found int64 of shape \[2, 0\]"),
    "fewer labels": (Batch(IDS, IDS[:, :4]), r"labels: .* found int64 of shape \[2, 4\]"),
    "positions of one row": (Batch(IDS, IDS, IDS[:1]), r"positions: .* found int64 of shape \[1, 8\]"),
    "floats": (Batch(IDS.double(), IDS), "input_ids: .* found float64"),
    "an id outside": (
        Batch(IDS + 120, IDS),
        "token id: expected 0 to 130, the model's vocabulary, found 131",
    ),
    "a label outside": (Batch(IDS, IDS - 1), "label: expected 0 to 130, the model's vocabulary, found -1"),
}


@pytest.mark.parametrize("what", BAD_BATCHES)
def test_a_batch_that_no_step_can_use_is_refused_in_one_line(what):
    batch, says = BAD_BATCHES[what]
    with pytest.raises(BadInput, match=says):
        Step(model := model_alone(), TokenLoss(model), micro_batch=1)(batch)


def bad_on_one_rank(layout, what):
    """Return what a step says on this rank if the last data rank's batch is a bad one."""
    model = built(layout, FP64)
    step, rows = Step(model, TokenLoss(model), micro_batch=1), Batch(IDS, IDS)
    bad = Batch(IDS[:1], IDS[:1]) if what == "fewer rows" else BAD_BATCHES[what][0]
    with pytest.raises(BadInput) as caught:
        step(bad if model.state.data_index == layout.data - 1 else rows)
    return str(caught.value)


@pytest.mark.parametrize("what", ["a tuple", "an id outside", "fewer rows"])
def test_a_bad_batch_of_one_data_rank_is_refused_by_all(what):
    """Also by a pipeline's other stages, which would wait for its activations."""
    first, second = run_parallel(bad_on_one_rank, 2, Layout.of(data=2, zero=3), what)
    if what == "fewer rows":
        assert "expected the same number on each data rank, found from 1 to 2" in first and first == second
    else:
        assert "found one that another rank refused" in first and re.search(BAD_BATCHES[what][1], second)


@pytest.mark.parametrize("layout", [Layout.of(pipeline=2), Layout(tensor=2)], ids=str)
def test_an_id_outside_the_vocabulary_is_refused_on_every_stage(layout):
    for said in run_parallel(bad_on_one_rank, 2, layout, "an id outside"):
        assert re.search(BAD_BATCHES["an id outside"][1], said)


def two_sizes(layout):
    """Return the loss of a step over all samples, and of one over half of them."""
    model = built(layout, FP64)
    ids, labels = whole_batch()
    step = Step(model, TokenLoss(model), micro_batch=1)
    losses = []
    for count in (SAMPLES, SAMPLES // 2):
        losses.append(float(step(Batch(ids[:count], labels[:count]))))
        model.zero_grad()
    return losses


def test_a_step_may_be_smaller_than_the_one_before():
    (whole,) = run_parallel(two_sizes, 1, Layout())
    for losses in run_parallel(two_sizes, 2, Layout.of(pipeline=2)):
        assert losses == pytest.approx(whole, rel=1e-12)


def refusal(layout, micro_batch, schedule, length):
    model = built(layout, FP64)
    step = Step(model, TokenLoss(model), micro_batch=micro_batch, schedule=schedule)
    ids, labels = whole_batch()
    step(Batch(ids[:, :length], labels[:, :length]))


@pytest.mark.parametrize(
    ("layout", "micro_batch", "schedule", "length", "words"),
    [
        pytest.param({"tensor": 2, "sequence": True}, 1, "1f1b", 7, "multiple of tensor=2", id="E9"),
        pytest.param({"pipeline": 2}, 4, "1f1b", 8, "over pipeline=2, found 1", id="E12"),
        pytest.param({"tensor": 2}, 3, "1f1b", 8, "divisor of the 4 samples", id="E13"),
        pytest.param({"pipeline": 2}, 1, "zigzag", 8, "dualpipev, found 'zigzag'", id="schedule"),
    ],
)
def test_every_rank_refuses_alike(layout, micro_batch, schedule, length, words):
    with pytest.raises(RankError) as error:
        run_parallel(refusal, 2, Layout.of(**layout), micro_batch, schedule, length)
    causes = [failure.cause for failure in error.value.failures]
    assert len(causes) == 2 and all(isinstance(cause, BadInput) and words in str(cause) for cause in causes)
