"""A step that would not train what it is to train stops every rank, before the update, with a name."""

import re

import pytest
import torch
from support.short_runs import built, tiny_recipe, trainer_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from trilith.data import Batch
from trilith.layers import IGNORE
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import Layout, NotTrained, ParallelState, divide_gradients
from trilith.parallel_state.engine import local_data
from trilith.testing import RankError, run_parallel
from trilith.training import ModuleStep, Precision, TrainStep, shard_over_data

FP64 = Precision(torch.float64, torch.float64, torch.float64)
LAYOUTS = [Layout(), Layout.of(tensor=2), Layout.of(data=2, zero=3), Layout.of(pipeline=2)]


def causes(error):
    """Return the error of each rank, after checking that all are the same."""
    found = [str(failure.cause) for failure in error.value.failures]
    assert all(isinstance(failure.cause, NotTrained) for failure in error.value.failures)
    assert len({*found}) == 1
    return found


def step_without(layout, fault):
    """Run a step of a zoo model whose last norm is cut off from the loss, or whose gradients vanish."""
    model = built(layout, FP64)
    if fault == "no gradient" and model.stage.last:
        model.norm.register_forward_hook(lambda module, given, out: given[0])
    if fault == "zeros" and model.stage.last:
        model.norm.register_forward_hook(lambda module, given, out: out * 0)
    tokens = torch.randint(131, (4, 9), generator=torch.Generator().manual_seed(0))
    mine = slice(model.state.data_index * 4 // layout.data, (model.state.data_index + 1) * 4 // layout.data)
    labels = torch.full_like(tokens[:, 1:], IGNORE) if fault == "no label" else tokens[:, 1:]
    step = TrainStep(model, micro_batch=1, dtype=torch.float64)
    return float(step(Batch(tokens[mine, :-1].contiguous(), labels[mine].contiguous())))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_parameter_without_a_gradient_stops_every_rank_and_is_named(layout):
    with pytest.raises(RankError) as error:
        run_parallel(step_without, layout.world, layout, "no gradient")
    found = causes(error)
    assert len(found) == layout.world and "norm.weight" in found[0] and "nothing was updated" in found[0]
    assert found[0].startswith(f"rank {layout.world - 1 if layout.pipeline > 1 else 0}: norm.weight")


def test_a_step_in_which_no_label_counts_may_have_gradients_of_zero_F14():
    assert run_parallel(step_without, 2, Layout.of(pipeline=2), "no label") == [0.0, 0.0]


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
    ModuleStep(model, loss, micro_batch=2, unused=unused, state=state)(samples)
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


def run_without_a_block(raw):
    """Leave out the first block from the second step on; return the error and whether a weight moved."""
    trainer, before = trainer_of(raw), []

    def leave_out(metrics):
        if "0" in trainer.model.layers:
            trainer.model.layers["0"].register_forward_hook(lambda module, given, out: given[0])
        before.extend(local_data(one).clone() for one in trainer.model.parameters())

    try:
        trainer.run(after_step=leave_out)
    except NotTrained as error:
        pairs = zip(trainer.model.parameters(), before, strict=True)
        return str(error), not all(torch.equal(local_data(one), was) for one, was in pairs)
    raise AssertionError("the run went on")


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}])
def test_a_run_names_the_step_and_changes_no_weight(layout, tmp_path):
    raw = tiny_recipe(tmp_path / "run", write_tokens(tmp_path / "tokens"), layout=layout)
    (said, moved), *others = run_parallel(run_without_a_block, layout.get("pipeline", 1), raw)
    says = r"step 2: rank 0: layers\.0\.\S+ and \d+ more of all ranks'.*nothing was updated"
    assert re.match(says, said) and not moved, said
    assert all(other == (said, moved) for other in others)


def test_offloaded_gradients_are_divided_where_they_rest():
    """The count is on the device, the gradients are on the host, and torch does not divide across the two."""
    with FakeTensorMode():
        model, count = nn.Linear(3, 3), torch.tensor(2.0, device="cuda")
        model.weight.grad = torch.ones(3, 3)
        with pytest.raises(RuntimeError):
            model.weight.grad.div_(count)
        divide_gradients(model, count)
        assert model.weight.grad.device.type == "cpu"
