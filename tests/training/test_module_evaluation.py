"""A module of a user's: evaluated in any layout, with outputs and losses that are right or are refused."""

from dataclasses import dataclass

import pytest
import torch
from support.refusals import refusal_of
from torch import nn
from torch.nn import functional as F
from trilith.layers import Stage
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.testing import run_parallel
from trilith.training import Precision, Step, make_adamw, shard_batch, shard_over_data

D, BLOCKS = 8, 4
LAYOUTS = [
    (Layout.of(data=2, zero=3), "1f1b"),
    (Layout.of(data=2, zero=1), "1f1b"),
    (Layout(pipeline=2), "gpipe"),
    (Layout(pipeline=2, virtual_stages=2, v_shape=True), "zbv"),
]


@dataclass
class Given:
    first: torch.Tensor
    more: dict[str, torch.Tensor]


class Net(nn.Module):
    """Dropout in every block; the last stage gives a dataclass with a dict."""

    def __init__(self, *, state=None):
        super().__init__()
        self.stage = Stage.of(BLOCKS, state=state)
        self.blocks = nn.ModuleDict({str(i): nn.Linear(D, D) for i in self.stage.blocks})
        self.dropout = nn.Dropout(0.5)

    def forward(self, h=None, *, x, stage=None):
        stage = stage or self.stage
        h = x if h is None else h
        for i in stage.blocks:
            h = h + self.dropout(self.blocks[str(i)](h).tanh())
        return Given(h[..., :3], {"rest": h[..., 3:]}) if stage.last else h


def loss(given, samples):
    counts = samples["counts"]
    each = given.first.square().sum(-1) + given.more["rest"].sum(-1)
    return (each * counts).sum(), counts.sum()


def batch(seed, samples=8, length=3):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, length, D, generator=g, dtype=torch.float64)
    return {"x": x, "counts": (torch.rand(samples, length, generator=g) < 0.6).double()}


def curve(layouts):
    """Take two steps without dropout, and evaluate around them with it, on batches of another shape."""
    torch.set_default_dtype(torch.float64)
    found = []
    for layout, schedule in layouts:
        state = ParallelState.start(layout)
        model = shard_over_data(Net(state=state), state, Precision(*[torch.float64] * 3))
        initialize(model, 3, state=state)
        optimizer = make_adamw(model, lr=0.1)
        step = Step(model, loss, micro_batch=2, schedule=schedule, state=state)
        numbers = [float(step.evaluate(shard_batch(batch(1, length=5), state)).loss)]
        for number in range(2):
            model.dropout.p = 0.0  # its masks depend on the layout
            numbers.append(float(step(shard_batch(batch(number + 2), state))))
            optimizer.step()
            optimizer.zero_grad()
            model.dropout.p = 0.5
            before = torch.random.get_rng_state()
            numbers.append(float(step.evaluate(shard_batch(batch(1, length=5), state)).loss))
            assert torch.equal(before, torch.random.get_rng_state()) and model.training
            assert all(p.grad is None for p in model.parameters())
        found.append(numbers)
    return found


def test_evaluation_is_one_processs_in_every_layout_and_leaves_training_as_it_was():
    (expected,) = run_parallel(curve, 1, [(Layout(), "1f1b")])[0]
    assert len(set(expected)) == 5
    for rank in run_parallel(curve, 2, LAYOUTS):
        for numbers, (layout, _) in zip(rank, LAYOUTS, strict=True):
            assert numbers == pytest.approx(expected, rel=1e-10), layout


class Tensors(Net):
    """Give a tensor from the last stage instead."""

    def forward(self, h=None, *, x, stage=None):
        given = super().forward(h, x=x, stage=stage)
        return torch.cat([given.first, given.more["rest"]], -1) if isinstance(given, Given) else given


def a_mean(given, samples):
    return F.mse_loss(given, samples["x"]), given.numel()


class Early(Net):
    """Give a dict between the stages."""

    def forward(self, h=None, *, x, stage=None):
        given = super().forward(h, x=x, stage=stage)
        return given if isinstance(given, Given) else {"h": given}


def refused(model, loss, layout):
    torch.set_default_dtype(torch.float64)
    state = ParallelState.start(layout)
    made = shard_over_data(model(state=state), state, Precision(*[torch.float64] * 3))
    initialize(made, 3, state=state)
    step = Step(made, loss, micro_batch=2, schedule="gpipe", state=state)
    return refusal_of(lambda: step(shard_batch(batch(0), state)))


@pytest.mark.parametrize("layout", [Layout(pipeline=2), Layout(data_replicate=2)], ids=str)
def test_every_rank_refuses_a_mean(layout):
    said = run_parallel(refused, 2, Tensors, a_mean, layout)
    assert said[0] == said[1] and "found a mean" in said[0]


def test_every_rank_refuses_a_dict_between_stages():
    said = run_parallel(refused, 2, Early, loss, Layout(pipeline=2))
    assert said[0] == said[1]
    assert "stage: output: expected a tensor or a tuple of them between stages, found dict" in said[0]
