"""A number that is not finite: all ranks stop before the update, and the first module to give it is named.

So does a step that would not train what it is to train.
"""

import re
from itertools import cycle

import pytest
import torch
from support.short_runs import tiny_recipe, trainer_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from trilith.parallel_state import Layout, NotTrained, ParallelState, PeerFailed, divide_gradients
from trilith.parallel_state.engine import local_data
from trilith.recipes.recipe import parse_recipe
from trilith.runs.events import read_events
from trilith.runs.metrics import read_metrics
from trilith.testing import RankError, run_parallel
from trilith.training import Precision, Step, shard_over_data
from trilith.training.not_finite import find_first_non_finite, looking

LAYOUTS = {"one": {}, "tp2": {"tensor": 2}, "pp2": {"pipeline": 2}, "dp2": {"data": 2}}
LAYOUTS["zero3"] = {"data": 2, "zero": 3}


def stopped(raw, spoil):
    """Take two good steps, then call ``spoil`` on this rank; return the error, and whether weights stayed."""
    trainer, before = trainer_of(raw), []

    def after(metrics):
        if metrics.step == 1:
            spoil(trainer)
            before.extend(local_data(one).clone() for one in trainer.model.parameters())

    try:
        trainer.run(after)
    except (PeerFailed, NotTrained) as error:
        now = [local_data(one) for one in trainer.model.parameters()]
        same = all(
            torch.allclose(*both, rtol=0, atol=0, equal_nan=True) for both in zip(before, now, strict=True)
        )
        return str(error), same
    return "", False


def weight(trainer):
    """Spoil one element of a weight of the last block on the last rank, which has it in every layout."""
    name = "layers.2.mlp.gate_up.up.weight"
    if trainer.state.rank == trainer.state.layout.world - 1:
        local_data(trainer.model.get_parameter(name))[-1, 0] = float("nan")


def row_weight(trainer):
    """Spoil a matrix whose product is summed over the tensor ranks before anybody checks it."""
    if trainer.state.rank == 1:
        local_data(trainer.model.get_parameter("layers.1.mlp.down.weight"))[0, 0] = float("inf")


def output(trainer):
    """Spoil the output of the attention on the last rank that has the block."""
    if trainer.state.rank == trainer.state.layout.world - 1:
        attention = trainer.model.get_submodule("layers.2.attention")
        attention.register_forward_hook(lambda module, inputs, out: out / 0)


def backward(trainer):
    """Spoil only the gradient of the last block's output: the forward is sound."""
    if "2" in trainer.model.layers:
        block = trainer.model.layers["2"]

        def spoil(module, inputs, out):
            if out.requires_grad:
                out.register_hook(lambda grad: grad * float("nan"))

        block.register_forward_hook(spoil)


def left_out(trainer):
    """Leave out the first block, whose parameters then have no gradient."""
    if "0" in trainer.model.layers:
        trainer.model.layers["0"].register_forward_hook(lambda module, inputs, out: inputs[0])


def last_left_out(trainer):
    """Leave out the last norm, of the last stage."""
    if trainer.model.stage.last:
        trainer.model.norm.register_forward_hook(lambda module, inputs, out: inputs[0])


def said(tmp_path, tokens, layout, spoil):
    """Return the error that all ranks report alike, after checking that none has updated anything."""
    raw = tiny_recipe(tmp_path / "run", tokens, layout=LAYOUTS[layout])
    found = run_parallel(stopped, parse_recipe(raw).layout.world, raw, spoil)
    assert len({text for text, _ in found}) == 1, found
    assert all(same for _, same in found), "the update went through"
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2
    event = read_events(tmp_path / "run" / "events.jsonl")[-1]
    assert (event["event"], event["step"], event["why"]) == ("failed", 2, found[0][0])
    return found[0][0]


#: The output of a block's attention, or the gradient nearest to a fault of the backward pass.
OUTPUT, GRADIENT = (
    r"1: the output of layers\.2\.attention",
    r"%d: the gradient of layers\.2\.mlp\.down\.weight",
)
LEFT_OUT = r"0: layers\.0\.\S+ and \d+ more of all ranks'.*nothing was updated"
LAST_LEFT_OUT = (("tp2", 0), ("pp2", 1), ("zero3", 0))
STOPPED = [
    *(
        (
            layout,
            weight,
            rf"{rank}: the output of layers\.2\.mlp\.gate_up is not finite; nothing was updated$",
        )
        for layout, rank in (("one", 0), ("tp2", 1), ("pp2", 1), ("zero3", 1))
    ),
    ("tp2", row_weight, r"1: the output of layers\.1\.mlp\.down is not finite"),
    ("dp2", output, OUTPUT),
    pytest.param("tp2", output, OUTPUT, marks=pytest.mark.slow),
    *(
        (layout, *fault)
        for layout, rank in (("one", 0), ("pp2", 1))
        for fault in ((backward, GRADIENT % rank), (left_out, LEFT_OUT))
    ),
    *(
        (layout, last_left_out, rf"{rank}: norm\.weight.*nothing was updated")
        for layout, rank in LAST_LEFT_OUT
    ),
]


@pytest.mark.parametrize(("layout", "spoil", "says"), STOPPED)
def test_the_first_module_that_is_not_finite_or_what_a_step_leaves_out_is_named(
    tmp_path, tokens, layout, spoil, says
):
    assert re.match(f"step 3: rank {says}", said(tmp_path, tokens, layout, spoil))


FP64 = Precision(torch.float64, torch.float64, torch.float64)


def causes(error):
    """Return the error of each rank, after checking that all are the same."""
    found = [str(failure.cause) for failure in error.value.failures]
    assert all(isinstance(failure.cause, NotTrained) for failure in error.value.failures)
    assert len({*found}) == 1
    return found


class Two(nn.Module):
    """Compute two layers, of which a step may use one; ``forward`` may return a constant."""

    def __init__(self, use):
        super().__init__()
        self.body, self.head, self.use = nn.Linear(3, 3).double(), nn.Linear(3, 3).double(), use

    def forward(self, x):
        y = self.body(x)
        if self.use == "all":
            y = self.head(y)
        return y.clamp(min=1e6) if self.use == "saturated" else y


def loss(y, samples):
    return y.square().sum(), y.numel()


def module_step(layout, use, unused):
    """Return which parameters have a gradient after a step."""
    state = ParallelState.start(layout)
    torch.manual_seed(0)
    model = Two(use)
    if layout.data > 1:
        shard_over_data(model, state, FP64)
    samples = {"x": torch.randn(4, 3, dtype=torch.float64)}
    Step(model, loss, micro_batch=2, unused=unused, state=state)(samples)
    return [one.grad is not None for one in model.parameters()]


@pytest.mark.parametrize("layout", [Layout(), Layout.of(data=2, zero=2)], ids=str)
def test_a_module_of_ones_own_says_what_a_step_may_leave_out(layout):
    world = layout.world
    assert run_parallel(module_step, world, layout, "all", None) == [[True] * 4] * world
    assert run_parallel(module_step, world, layout, "body", "^head") == [[True, True, False, False]] * world
    with pytest.raises(RankError) as error:
        run_parallel(module_step, world, layout, "body", None)
    assert causes(error)[0].startswith("rank 0: head.weight and ")
    with pytest.raises(RankError) as error:
        run_parallel(module_step, world, layout, "saturated", "head")
    assert "every gradient is exactly zero, rank 0's body.weight among them" in causes(error)[0]


def test_an_output_in_a_dict_is_looked_into():
    model, divisors = Two("all"), cycle((1, 0))
    model.register_forward_hook(lambda module, inputs, y: {"y": y / next(divisors)})
    step = Step(model, lambda y, samples: (y["y"].sum(), 1), micro_batch=1)
    samples = {"x": torch.ones(2, 3, dtype=torch.float64)}
    with looking(step) as origins:
        step.forward(samples)
    assert origins[0].micro_batch == 1  # the first is 0
    assert not model._forward_pre_hooks
    with pytest.raises(PeerFailed, match="step 1: rank 0: the output of the model is not finite"):
        find_first_non_finite(step, 1, samples)


def test_offloaded_gradients_are_divided_where_they_rest():
    """The count is on the device, the gradients are on the host, and torch does not divide across the two."""
    with FakeTensorMode():
        model, count = nn.Linear(3, 3), torch.tensor(2.0, device="cuda")
        model.weight.grad = torch.ones(3, 3)
        with pytest.raises(RuntimeError):
            model.weight.grad.div_(count)
        divide_gradients(model, count)
        assert model.weight.grad.device.type == "cpu"
