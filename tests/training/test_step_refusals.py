"""Check what ``Step`` refuses, on every rank alike, because it would silently train other numbers."""

import math
from dataclasses import dataclass

import pytest
import torch
from support.refusals import Refused, refusal_of, refusals
from torch import nn
from torch.nn import functional as F
from trilith.layers import ColumnParallelLinear, Stage, VocabParallelEmbedding
from trilith.parallel_state import BadInput, Layout, ParallelState, initialize
from trilith.testing import run_parallel
from trilith.training import Precision, Step, shard_batch, shard_over_data


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


@dataclass
class Packed:
    a: torch.Tensor


PACKS = {
    "dataclass": (Packed, lambda given: given.a),
    "tuple": (lambda y: (y, y), lambda given: given[0]),
    "dict": (lambda y: {"a": y, "b": (y,)}, lambda given: given["a"]),
    "tensor": (lambda y: y, lambda given: given),
}


@pytest.mark.parametrize("how", PACKS)
@pytest.mark.parametrize("call", [Step.__call__, Step.evaluate])
def test_a_mean_is_refused_however_the_model_s_output_is_packed(how, call):
    pack, of = PACKS[how]
    call(Step(Given(pack), lambda y, samples: squares(of(y), samples), micro_batch=2), X)
    with pytest.raises(BadInput, match="found a mean"):
        call(Step(Given(pack), lambda y, samples: (of(y).square().mean(), len(of(y))), micro_batch=2), X)


def a_contrast(y, samples):
    scores = y @ y.T
    return F.cross_entropy(scores, torch.arange(len(y)), reduction="sum"), len(y)


RIGHT = [
    squares,
    lambda y, samples: (y.square().sum() + 9 * len(y), len(y)),
    a_contrast,
    lambda y, samples: (y.square().mean(), 1),
    lambda y, samples: ((y + torch.randn_like(y)).square().sum(), len(y)),
    lambda y, samples: ((y * 0).sum(), 0),
]


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_loss_that_is_a_mean_is_refused_and_no_other_is(micro_batch):
    """Each sum here has another count, or is drawn anew, or is not of each row by itself."""
    with pytest.raises(BadInput, match="expected the sum of the losses, with their number, found a mean"):
        Step(Given(), lambda y, samples: (y.square().mean(), y.numel()), micro_batch=micro_batch)(X)
    with pytest.raises(BadInput, match=r"found a part that is the same .*Multiply that part by the count"):
        Step(Given(), lambda y, samples: (y.square().sum() + 9, len(y)), micro_batch=micro_batch)(X)
    for right in RIGHT:
        Step(Given(), right, micro_batch=micro_batch)(X)


def test_counts_below_one_divide_as_they_are():
    def loss(y, samples):
        nothing = y.sum() - y.sum().detach()  # but a gradient, without which a step is refused
        return 0.01 * samples["x"].sum() + nothing, 0.01 * len(y)

    assert float(Step(Given(), loss, micro_batch=2)(X)) == pytest.approx(float(X["x"].sum() / 4), rel=1e-6)


def stepped(why, says, loss=squares, samples=None, micro_batch=2, states=None, **options):
    """A step that is made and called; ``states``: what the model says of itself."""

    def call(_):
        model = Given()
        model.__dict__ |= states or {}
        Step(model, loss, micro_batch=micro_batch, **options)(samples or X)

    return Refused(why, call, says)


def stacked(why, says, **changes):
    """A batch of which not every value has a sample in each row, however it is used."""
    step, samples = Step(Given(), squares, micro_batch=2), {**X, **changes}
    uses = {"step": step, "evaluate": step.evaluate, "shard_batch": shard_batch}
    return [Refused(f"{why}-{use}", lambda _, c=call: c(samples), says) for use, call in uses.items()]


def under(layout, call, why, says):
    """A call with a state of ranks that are not here."""
    return Refused(why, lambda _: call(ParallelState.stand_in(layout)), says)


class Staged(nn.Module):
    """A layer on each of two stages; ``gives`` packs what goes to the next."""

    def __init__(self, gives, state):
        super().__init__()
        self.stage, self.gives = Stage.of(2, state=state), gives
        self.blocks = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in self.stage.blocks})

    def forward(self, h=None, *, x):
        y = x if h is None else h
        for block in self.blocks.values():
            y = block(y)
        return y if self.stage.last else self.gives(y)


def packed_in_a_dict(y):
    return {"y": y}


def unpacked(y):
    return y


def a_mean(y, samples):
    return F.mse_loss(y, samples["x"]), y.numel()


def of_each_rank(y, samples, state):
    return (1 + state.tensor.index) * y.sum(), y.numel()


def refused_on_ranks(layout, gives, loss, base=1.0):
    state = ParallelState.start(layout)
    model = shard_over_data(Staged(gives, state), state, Precision())
    initialize(model, 3, state=state)
    step = Step(model, loss, micro_batch=2, schedule="gpipe", state=state)
    return refusal_of(lambda: step(shard_batch({"x": torch.randn(8, 4)}, state), scale=base**state.rank))


@pytest.mark.parametrize(
    ("layout", "gives", "loss", "says"),
    [
        (Layout(pipeline=2), unpacked, a_mean, "found a mean"),
        (Layout(data_replicate=2), unpacked, a_mean, "found a mean"),
        (
            Layout(tensor=2),
            unpacked,
            of_each_rank,
            "expected equal sums on the ranks of a tensor group",
        ),
        (
            Layout(pipeline=2),
            packed_in_a_dict,
            squares,
            "stage: output: expected a tensor or a tuple of them between stages, found dict",
        ),
    ],
)
def test_every_rank_refuses_a_mean_and_a_dict_between_stages(layout, gives, loss, says):
    first, second = run_parallel(refused_on_ranks, 2, layout, gives, loss)
    assert first == second and says in first


def test_ranks_with_different_loss_scales_are_refused_alike():
    """As torch's GradScaler has them after an overflow on one rank, which alone skipped its update."""
    first, second = run_parallel(refused_on_ranks, 2, Layout(pipeline=2), unpacked, squares, 0.5)
    assert first == second and "scale: expected the same on each rank, found from 0.5 to 1. torch" in first


def at_once(state):
    return Step(Given(), squares, micro_batch=1, state=state)


ROWS, SEQUENCE = "a tensor with the samples on dim 0, found", Layout.of(tensor=2, sequence=True)
NO_SEQUENCE = r"sequence parallelism: input: expected \(batch, sequence, features\)"
test_what_a_step_cannot_train_is_refused = refusals(
    *(
        stepped(
            f"counts-{count}",
            "step: loss: expected counts that are finite and not below 0",
            lambda y, samples, count=count: (y.sum(), count),
        )
        for count in (-3, math.nan, math.inf)
    ),
    *(
        stepped(
            f"micro-batch-{size!r}",
            "step: micro_batch: expected a whole number of 1 or more",
            micro_batch=size,
        )
        for size in (0, -1, 1.5, True, "2", None)
    ),
    stepped("micro-batch-3-of-4", "a divisor of the 4 samples of a data rank, found 3", micro_batch=3),
    stepped("no-sample", "batch: samples: expected at least one, found 0", samples={"x": X["x"][:0]}),
    stepped("no-pattern", r"step: unused: expected a pattern over names .* found '\('", unused="("),
    *(
        stepped(f"loss-{found}", f"step: loss: expected the sum of the losses.*found {found}", loss)
        for found, loss in {
            r"a tensor of shape \[\]\.": lambda y, samples: y.mean(),
            r"a tensor of shape \[2\] and int": lambda y, samples: (y.sum(-1), 8),
            "NoneType": lambda y, samples: None,
            "zip": zip,  # Python knows no signature of it
            r"a tensor of shape \[\] and int and int": lambda y, samples: (y.sum(), 1, 2),
            r"a tensor of shape \[\] and str": lambda y, samples: (y.sum(), "8"),
        }.items()
    ),
    stepped(
        "first-input", "batch: ids: expected the model's first input, found x", states={"first_input": "ids"}
    ),
    stepped("a-shape", "step: model.first_input: expected the name", states={"hidden_shape": len}),
    *stacked("a-number", f"batch: scale: expected {ROWS} a te", scale=torch.tensor(2.0)),
    *stacked("a-list", f"batch: names: expected {ROWS} list", names=["a"] * 4),
    *stacked("a-seed", f"batch: seed: expected {ROWS} int", seed=3),
    *stacked("fewer", "batch: expected tensors with the same number of samples", y=torch.zeros(3, 3)),
    under(
        Layout(data_replicate=3),
        lambda state: shard_batch(X, state),
        "samples-for-3-ranks",
        "a multiple of data=3, found 4",
    ),
    under(Layout(data_replicate=2), at_once, "not-shared-over-data", "shared over data=2"),
    under(Layout(context=2), at_once, "context", "context: expected 1"),
    *(
        under(SEQUENCE, call, f"{why}-without-a-sequence", NO_SEQUENCE)
        for why, call in {
            "a-row": lambda state: ColumnParallelLinear(4, 6, state=state)(torch.zeros(4)),
            "rows": lambda state: ColumnParallelLinear(4, 6, state=state)(torch.zeros(3, 4)),
            "an-id": lambda state: VocabParallelEmbedding(50, 6, state=state)(torch.tensor(0)),
            "ids": lambda state: VocabParallelEmbedding(50, 6, state=state)(torch.tensor([0, 0, 0])),
        }.items()
    ),
)
