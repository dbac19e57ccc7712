"""Losses and a model that no recipe has, under the one step: in every layout they train as one process."""

import pickle
from functools import cache, partial

import pytest
import torch
from support.any_loss import (
    NAMES,
    Contrast,
    Ladder,
    Preference,
    Trial,
    batch,
    contrast,
    train,
    under_every_schedule,
)
from support.strangers import SAMPLES, STRANGERS, STUBS, images
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput
from trilith.data.batch import BatchParts
from trilith.layers import IGNORE
from trilith.parallel_state import BadInput, Constant, Layout, ParallelState, declare, initialize
from trilith.testing import run_parallel
from trilith.testing.layouts import assemble, differences
from trilith.training import (
    FunctionLoss,
    Step,
    Update,
    make_adamw,
)

#: What sums of rows differ by: margins are small differences of large sums.
BOUNDS = {"preference": 1e-9}


@cache
def on_one_process(loss):
    ((seen, terms),) = run_parallel(train, 1, [Trial(loss, micro_batch=SAMPLES)])[0]
    tensors = [assemble([pieces]) for pieces in (seen.initial, seen.gradients, seen.parameters)]
    return seen, terms, tensors


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_under_every_schedule_a_stranger_trains_as_on_one_process(name, whole):
    assert_trains_as_on_one_process(name, under_every_schedule(name, whole=whole))


SHAPED = {"pipeline": 2, "virtual_stages": 2, "v_shape": True}
OF_STUBS = [
    (Layout.of(tensor=2, sequence=True), "1f1b"),
    (Layout.of(data=2, zero=3), "1f1b"),
    (Layout.of(**SHAPED), "zbv"),
    (Layout.of(**SHAPED, data=2, zero=3), "dualpipev"),
]


@pytest.mark.parametrize("name", STUBS)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_module_with_the_asked_names_alone_trains_as_on_one_process(name, whole):
    """Also with adapters, whose base is frozen; each of the two in half of the layouts, or in all."""
    layouts = OF_STUBS if whole else OF_STUBS[[*STUBS].index(name) :: 2]
    assert_trains_as_on_one_process(name, [Trial(name, *how) for how in layouts])


class OfAllStages(nn.Module):
    """Hold a table on each stage, or on those of some pipeline ranks, as one parameter."""

    def __init__(self, ranks, ends, state):
        super().__init__()
        self.net = nn.ModuleDict({str(state.at.pipeline): nn.Linear(4, 4)})
        if state.at.pipeline in ranks:
            self.table = nn.Parameter(torch.ones(4))
            declare(self, "table", ends=ends, initial=Constant(1.0), state=state)

    def forward(self, received=None, *, x):
        (net,) = self.net.values()
        return net(x if received is None else received) + getattr(self, "table", 0.0)


def refusal_of_a_table(cases):
    """Return what a first step says of a table on these pipeline ranks, or nothing."""
    torch.set_default_dtype(torch.float64)
    state, refusals = ParallelState.start(Layout(pipeline=3)), []
    for ranks, ends in cases:
        step = Step(OfAllStages(ranks, ends, state), squares, micro_batch=1, state=state)
        try:
            step({"x": torch.ones(4, 4, dtype=torch.float64)})
            refusals.append("")
        except BadInput as error:
            refusals.append(str(error))
    return refusals


def test_a_parameter_of_two_stages_whose_gradients_nothing_adds_up_is_refused_on_all_ranks():
    refused = [((0, 1), False), ((0, 2), False), ((0, 1), True), ((0, 1, 2), True)]
    fine = [((0, 2), True), ((1,), False)]
    for *refusals, of_ends, of_one in run_parallel(refusal_of_a_table, 3, [*refused, *fine]):
        for (ranks, _), refusal in zip(refused, refusals, strict=True):
            advice = f"the first and the last, found ranks {', '.join(map(str, ranks))}. Compute with it"
            assert refusal.startswith("model: table: expected one pipeline rank,") and advice in refusal
        assert (of_ends, of_one) == ("", "")


def assert_trains_as_on_one_process(loss, trials):
    expected, expected_terms, tensors = on_one_process(loss)
    assert all(0.01 < abs(value) < 10 for terms in expected_terms for value in terms.values())
    close = BOUNDS.get(loss, 1e-10)
    for world in (2, 4):
        some = [trial for trial in trials if trial.layout.world == world]
        for trial, *ranks in zip(some, *run_parallel(train, world, some, timeout=300), strict=True):
            for seen, terms in ranks:
                assert seen.losses == pytest.approx(expected.losses, rel=close), trial
                assert seen.norms == pytest.approx(expected.norms, rel=close), trial
                for seen_terms, of_one in zip(terms, expected_terms, strict=True):
                    assert seen_terms == pytest.approx(of_one, rel=close), trial
            for what, whole in zip(("initial", "gradients", "parameters"), tensors, strict=True):
                for name, difference in differences(whole, [getattr(seen, what) for seen, _ in ranks]):
                    assert difference <= close, (str(trial), what, name)


def test_the_second_forward_of_a_loss_over_the_whole_step_has_the_first_one_s_dropout():
    """``Contrast`` itself compares what both give, under a schedule whose forwards come in another order."""
    layouts = (Layout(), "1f1b"), (Layout.of(pipeline=2, virtual_stages=2, v_shape=True), "zbv")
    for layout, schedule in layouts:
        trials = [Trial("contrast", layout, schedule, dropout=dropout) for dropout in (0.0, 0.4)]
        for (plain, terms), (dropped, dropped_terms) in run_parallel(train, layout.world, trials):
            assert plain.losses[0] != dropped.losses[0]
            assert terms[0]["held out"] == dropped_terms[0]["held out"], "dropout in an evaluation"


def alone(build=Ladder, **kind):
    model = build(**kind).double()
    initialize(model, 3)
    return model


def preference(model, samples):
    labels = samples["labels"]
    gains = -F.cross_entropy(model(tokens=samples["tokens"])[..., :31].mT, labels, reduction="none")
    chosen, rejected = (gains.sum(1) - samples["reference"]).view(-1, 2).unbind(1)
    tokens = gains[::2].sum() / (labels[::2] != IGNORE).sum()
    return -F.logsigmoid(0.5 * (chosen - rejected)).mean() - 0.3 * tokens


PLAIN = {
    "preference": (Ladder, Preference(ParallelState.alone()), batch, preference),
    "contrast": (
        partial(Ladder, pooled=True),
        Contrast(),
        batch,
        lambda *of: contrast(of[0](tokens=of[1]["tokens"])).mean(),
    ),
    "gallery": (
        STRANGERS["gallery"].build,
        STRANGERS["gallery"].loss(),
        images,
        lambda model, of: F.cross_entropy(model(images=of["images"]), of["kind"]),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_on_one_device_a_loss_is_plain_torch_s(name):
    build, loss, rows, plain = PLAIN[name]
    model, samples = alone(build), rows(0)
    mean = Step(model, loss, micro_batch=2)(samples)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    expected = plain(model, samples)
    expected.backward()
    assert float(mean) == pytest.approx(float(expected.detach()), rel=1e-11)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(gradient, parameter.grad, rtol=1e-9, atol=1e-12)


class Sine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x).sin()


def squares(y, samples):
    return y.square().sum(), len(y)


@pytest.mark.parametrize("count", [None, lambda samples: len(samples["x"])])
def test_a_loss_scale_changes_no_bit_of_a_loss_or_of_a_gradient_in_fp64(count):
    model, x = Sine(), torch.arange(24.0, dtype=torch.float64).view(6, 4)
    results = []
    for scale in (1.0, 2.0**16):
        loss = Step(model, FunctionLoss(squares, count=count), micro_batch=2)({"x": x}, scale=scale)
        assert model.linear.weight.grad is not None
        results.append((loss, model.linear.weight.grad / scale))
        model.zero_grad()
    assert all(torch.equal(plain, scaled) for plain, scaled in zip(*results, strict=True))


@pytest.mark.parametrize("count", [None, lambda samples: len(samples["x"])])
def test_a_first_step_that_looks_for_faults_draws_what_the_others_draw(count):
    loss = FunctionLoss(lambda y, samples: ((y * torch.rand_like(y)).sum(), len(y)), count=count)
    step, losses = Step(Sine(), loss, micro_batch=2), []
    for _ in range(2):
        torch.manual_seed(0)
        step.model.zero_grad()
        losses.append(step({"x": torch.ones(6, 4, dtype=torch.float64)}))
    assert losses[0] == losses[1]


def test_an_update_refuses_a_mean_before_anything_moves():
    """Here of the output of a model of transformers."""
    model = Sine()
    model.register_forward_hook(lambda module, args, y: CausalLMOutput(logits=y))
    step = Step(model, lambda y, samples: (y.logits.square().mean(), y.logits.numel()), micro_batch=2)
    update, before = Update(model, make_adamw(model, lr=0.1), clip=1.0), model.linear.weight.detach().clone()
    with pytest.raises(BadInput, match="found a mean"):
        update(step.launch({"x": torch.arange(16.0, dtype=torch.float64).view(4, 4)}))
    assert torch.equal(model.linear.weight, before) and update.made == 0


class Uncounted(Preference):
    count = None

    def __init__(self):
        super().__init__(ParallelState.alone())


class Collecting(Contrast):
    whole_step = None


def test_a_stated_count_that_is_another_than_the_function_s_is_refused():
    def step(count):
        return Step(Sine(), FunctionLoss(squares, count=count), micro_batch=2)

    x = {"x": torch.ones(4, 4, dtype=torch.float64)}
    used = FunctionLoss(squares)
    assert used.terms == pickle.loads(pickle.dumps(used)).terms  # as for the ranks of run_parallel
    with pytest.raises(BadInput, match="expected the function to count as count= does"):
        step(lambda samples: 2 * len(samples["x"]))(x)
    with pytest.raises(BadInput, match=r"step: loss\.loss: expected a count that is finite"):
        step(lambda samples: -1)(x)
    for lacks, loss in (("count", Uncounted), ("whole_step", Collecting)):
        with pytest.raises(BadInput, match=rf"step: {loss.__name__}\.{lacks}: expected a method"):
            Step(Sine(), loss(), micro_batch=2)
    with pytest.raises(BadInput, match="batch: expected tensors by name, found BatchParts"):
        Step(Sine(), squares, micro_batch=2)(BatchParts(4, 4, iter(())))
    with pytest.raises(BadInput, match="micro_batch: expected a multiple of 2"):
        Step(alone(), Preference(ParallelState.alone()), micro_batch=3)
    with pytest.raises(BadInput, match=r"balance: expected 0: .*FunctionLoss\(loss, count"):
        Step(alone(routed=True), squares, micro_batch=2)
