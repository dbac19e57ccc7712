"""Check what ``ModuleStep`` refuses on every rank alike, because it would silently train other numbers."""

import math

import pytest
import torch
from torch import nn
from trilith.parallel_state import BadInput, Layout, ParallelState, initialize
from trilith.testing import run_parallel
from trilith.training import ModuleStep, Precision, shard_over_data


class Given(nn.Module):
    """A linear layer whose output is packed as ``pack`` says."""

    def __init__(self, pack=lambda y: y):
        super().__init__()
        self.linear, self.pack = nn.Linear(4, 2), pack

    def forward(self, x):
        return self.pack(self.linear(x))


def squares(y, samples):
    return y.square().sum(), len(y)


X = {"x": torch.arange(16.0).view(4, 4)}


def test_gradients_of_an_earlier_step_are_refused_and_zeros_are_not():
    model = Given()
    step = ModuleStep(model, squares, micro_batch=2)
    first = step(X)
    expected = model.linear.weight.grad
    assert expected is not None
    expected = expected.clone()
    with pytest.raises(
        BadInput, match=r"step: gradients: expected none, or zeros, .* optimizer\.zero_grad\(\)"
    ):
        step(X)
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=set_to_none)
        assert torch.equal(step(X), first)
        found = model.linear.weight.grad
        assert found is not None and torch.equal(found, expected)


def stale_on_the_last_rank(layout):
    state = ParallelState.start(layout)
    model = shard_over_data(Given(), state, Precision())
    initialize(model, 1, state=state)
    step = ModuleStep(model, squares, micro_batch=2, state=state)
    step(X)
    if state.rank == 0:
        model.zero_grad()
    try:
        step(X)
    except BadInput as error:
        return str(error)
    return "trained"


def test_every_rank_refuses_what_one_has_left():
    said = run_parallel(stale_on_the_last_rank, 2, Layout.of(data=2, zero=3))
    assert said[0] == said[1] and "found those of an earlier step" in said[0]


PACKS = {
    "tuple": (lambda y: (y, y), lambda given: given[0]),
    "dict": (lambda y: {"a": y, "b": (y,)}, lambda given: given["a"]),
    "tensor": (lambda y: y, lambda given: given),
}


@pytest.mark.parametrize("how", PACKS)
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_mean_is_refused_however_the_model_s_output_is_packed(how, call):
    pack, of = PACKS[how]

    def mean(given, samples):
        return of(given).square().mean(), len(of(given))

    def total(given, samples):
        return of(given).square().sum(), len(of(given))

    for loss in (total, mean):
        step = ModuleStep(Given(pack), loss, micro_batch=2)
        run = step if call == "step" else step.evaluate
        if loss is total:
            run(X)
            continue
        with pytest.raises(BadInput, match="found a mean"):
            run(X)


@pytest.mark.parametrize("count", [-3, math.nan, math.inf])
def test_a_count_that_would_turn_or_lose_the_gradients_is_refused(count):
    step = ModuleStep(Given(), lambda y, samples: (y.sum(), count), micro_batch=2)
    with pytest.raises(BadInput, match="step: loss: expected counts that are finite and not below 0"):
        step(X)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2", None])
def test_a_micro_batch_that_is_no_number_of_samples_is_refused(size):
    with pytest.raises(BadInput, match="step: micro_batch: expected a whole number of 1 or more"):
        ModuleStep(Given(), squares, micro_batch=size)


def test_an_empty_batch_and_a_pattern_that_is_none_are_refused():
    with pytest.raises(BadInput, match="batch: samples: expected at least one, found 0"):
        ModuleStep(Given(), squares, micro_batch=2)({"x": X["x"][:0]})
    with pytest.raises(BadInput, match=r"step: unused: expected a pattern over names .* found '\('"):
        ModuleStep(Given(), squares, micro_batch=2, unused="(")
