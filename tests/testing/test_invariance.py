"""Mistakes that users of parallel layers make, made on purpose: the first module that differs is named."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trilith.layers import (
    ColumnParallelLinear,
    Experts,
    LayerNorm,
    MoE,
    RMSNorm,
    RowParallelLinear,
    Stage,
    TopKRouter,
    enter_tensor,
    gather_from_tensor,
    leave_tensor,
    split_to_tensor,
)
from trilith.parallel_state import (
    BadInput,
    Cut,
    Declaration,
    Layout,
    Normal,
    ParallelState,
    declare_parameter,
    local,
)
from trilith.testing import LayoutVariance, RankError, assert_layout_invariant
from trilith.testing.invariance.relation import place
from trilith.training import FunctionLoss

D, HIDDEN = 8, 16
BATCH = {
    "x": torch.randn(4, 6, D, generator=torch.Generator().manual_seed(1)),
    "wanted": torch.randn(4, 6, D, generator=torch.Generator().manual_seed(2)),
}
TENSOR, SEQUENCE = Layout(tensor=2), Layout(tensor=2, sequence=True)


class Hand(nn.Module):
    """Compute a feed-forward net cut by hand with the collective pairs, with one ``mistake``."""

    def __init__(self, mistake, *, state):
        super().__init__()
        self.mistake, self.state = mistake, state or ParallelState.alone()
        start, cut = Normal(0.3), None if mistake == "uncut" else Cut(0)
        if mistake == "undeclared":
            self.up = nn.Parameter(torch.zeros(HIDDEN // self.state.tensor.size, D))
        else:
            declare_parameter(self, "up", Declaration((HIDDEN, D), cut=cut, initial=start), self.state)
        declare_parameter(self, "down", Declaration((D, HIDDEN), cut=Cut(1), initial=start), self.state)
        partial = ("tensor",) if (self.state.sequence or mistake == "twice") and mistake != "partial" else ()
        declare_parameter(self, "bias", Declaration((D,), partial=partial, initial=start), self.state)

    def forward(self, x):
        up, down, bias = (local(getattr(self, name)) for name in ("up", "down", "bias"))
        x = x if self.mistake == "copy" else enter_tensor(x, self.state)
        h = F.linear(x, up).tanh()
        if self.mistake == "every bias":
            return leave_tensor(F.linear(h, down) + bias, self.state)
        y = F.linear(h, down)
        y = y if self.mistake == "sum" else leave_tensor(y, self.state)
        return y + bias


class Pooled(nn.Module):
    """Attend by keys alone: their bias moves all scores of a row alike, so its gradient is rounding."""

    def __init__(self, *, state=None):
        super().__init__()
        self.key, self.value = (ColumnParallelLinear(D, HIDDEN, state=state) for _ in range(2))
        self.out = RowParallelLinear(HIDDEN, D, state=state)

    def forward(self, x):
        return 1e4 * self.out(self.key(x).softmax(1) * self.value(x))


class Net(nn.Module):
    def __init__(self, mistake="", *, state=None):
        super().__init__()
        self.state, self.mistake = state or ParallelState.alone(), mistake
        self.first = nn.Linear(D, D)
        self.norm = RMSNorm(D, state=state)
        self.hand = Hand(mistake, state=state)
        self.mlp = nn.ModuleDict(
            {
                "up": ColumnParallelLinear(D, HIDDEN, state=state),
                "down": RowParallelLinear(HIDDEN, D, state=state),
            }
        )
        self.under_two_names = self.mlp["up"]
        self.last = LayerNorm(D, state=state)

    def forward(self, x):
        x = self.first(x)
        if self.state.sequence:
            x = split_to_tensor(x, self.state, dim=1)
            if self.mistake == "order":
                x = x.flip(1)  # as if a rank held another piece
        x = x + self.hand(self.norm(x))
        h = self.mlp["up"](x)
        if self.mistake == "gate":  # halves of a rank's own piece are no halves of the whole
            a, b = h.chunk(2, dim=-1)
            h = torch.cat([a.tanh() * b, b], dim=-1)
        x = self.last(x + self.mlp["down"](h))
        return gather_from_tensor(x, self.state, dim=1) if self.state.sequence else x


class Scaled(nn.Module):
    """Scale what goes into a cut matrix with no collective before it: each rank has a part of the scale's
    gradient, as is declared.
    """

    def __init__(self, *, state):
        super().__init__()
        stated = Declaration((D,), partial=("tensor",), initial=Normal(0.3))
        declare_parameter(self, "scale", stated, state)
        self.hand = Hand("copy", state=state)

    def forward(self, x):
        return self.hand(x * local(self.scale))


class Repeated(nn.Module):
    """Call one block twice, and between another one that has a layer of it, and change outputs in place."""

    def __init__(self, *, state):
        super().__init__()
        blocks = [
            nn.Sequential(
                ColumnParallelLinear(D, HIDDEN, state=state), nn.SiLU(inplace=True),
                RowParallelLinear(HIDDEN, D, state=state),
            )
            for _ in range(2)
        ]  # fmt: skip
        blocks[1][0] = blocks[0][0]
        self.blocks = nn.ModuleList([*blocks, blocks[0]])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def loss(y, samples):
    return (y - samples["wanted"]).square().sum(), y.numel()


def numbers(samples):
    return samples["wanted"].numel()


def test_what_is_right_is_right_in_every_layout():
    layouts = [TENSOR, SEQUENCE, Layout.of(data=2, zero=2), Layout.of(tensor=2, data=2, zero=3)]
    found = assert_layout_invariant(Net, BATCH, layouts=layouts, loss=FunctionLoss(loss))
    assert list(found) == layouts
    for one in found.values():
        assert 0 < one.gradients < 1e-12
        assert one.forward < 1e-12
        assert one.weights < 1e-10
    assert_layout_invariant(Net, BATCH, layouts=[TENSOR], checkpoint=False)  # weighed at random
    assert_layout_invariant(Scaled, BATCH, layouts=[TENSOR], steps=1, checkpoint=False)
    assert_layout_invariant(Repeated, BATCH, layouts=layouts[2:], loss=loss, steps=2)
    assert_layout_invariant(Mixture, BATCH, layouts=[TENSOR], loss=loss, steps=2)


@pytest.mark.parametrize(
    ("mistake", "layout", "phase", "module", "said"),
    [
        ("sum", TENSOR, "forward", "hand", "only a part on each rank"),
        ("copy", TENSOR, "backward", "hand", "only a part on each rank.*copy_to_tensor"),
        ("partial", SEQUENCE, "gradient", "hand", r'hand\.bias.*only a part.*partial=\("tensor",\)'),
        ("twice", TENSOR, "gradient", "hand", "2 times too large.*does not belong there"),
        ("undeclared", TENSOR, "structure", "hand", r"hand\.up is \(8, 8\), and \(16, 8\).*cut=Cut\(0\)"),
        ("every bias", TENSOR, "forward", "hand", "one vector too much at every place, as of a bias"),
        ("order", SEQUENCE, "forward", "", "what it gives to norm differs"),
        ("gate", TENSOR, "forward", "", r"the model itself: what it gives to mlp\.down differs"),
    ],
)
def test_the_first_module_that_differs_is_named(mistake, layout, phase, module, said):
    with pytest.raises(LayoutVariance, match=said) as caught:
        assert_layout_invariant(
            partial(Net, mistake), BATCH, layouts=[layout], loss=loss, steps=1, checkpoint=False
        )
    fault = caught.value.fault
    assert (fault.phase, fault.module) == (phase, module), str(caught.value)


class Otherwise(nn.Module):
    """Do something in a layout otherwise than on one process."""

    def __init__(self, mistake, *, state):
        super().__init__()
        self.mistake, self.forwards = mistake if state is not None else "", 0
        self.first, self.last = LayerNorm(D, state=state), LayerNorm(D, state=state)
        if self.mistake == "more":
            self.more = nn.Parameter(torch.zeros(D))
        if mistake == "held whole":
            stated = Declaration((D, D), cut=Cut(0))
            declare_parameter(self, "held", stated, state)
            self.held = nn.Parameter(torch.zeros(D, D))
        self.last.bias.requires_grad_(self.mistake != "frozen")

    def gradient(self, x, mistake, factor):
        """Return ``x``, whose gradient is another by ``factor`` if this is the mistake."""
        return x + (factor - 1) * (x - x.detach()) if self.mistake == mistake else x

    def forward(self, x):
        self.forwards += 1
        if self.mistake == "raised":
            raise ZeroDivisionError
        x = self.gradient(self.first(x), "backward", 1.5)
        weight = self.gradient(self.last.weight, "gradient", 1.5)
        if self.forwards > 4:  # from the second step on
            x = x * (2 if self.mistake == "later" else 1)
            weight = self.gradient(weight, "update", -1.0)
        x = F.layer_norm(x, (D,), weight, self.last.bias)
        x = x + self.held.mean() if hasattr(self, "held") else x
        return (x, x) if self.mistake == "pair" else x


@pytest.mark.parametrize(
    ("phase", "module", "says", "mistake"),
    [
        ("structure", "", "more is not there on one process", "more"),
        (
            "structure",
            "",
            r"held is declared so that a rank holds \(4, 8\), and it holds \(8, 8\)",
            "held whole",
        ),
        ("backward", "first", "the gradient of its output differs by 5.0e-01", "backward"),
        (
            "gradient",
            "last",
            "last.weight differs by 5.0e-01, though every activation's is right$",
            "gradient",
        ),
        ("gradient", "last", "last.bias has no gradient in the layout", "frozen"),
        ("update", "", "the loss of rank 0 is .* in step 2, though the first gradients were right", "later"),
        ("update", "last", "last.weight differs by .* after 2 steps; the first was right", "update"),
    ],
)
def test_what_a_layout_does_otherwise_is_named(phase, module, says, mistake):
    with pytest.raises(LayoutVariance, match=says) as caught:
        assert_layout_invariant(partial(Otherwise, mistake), BATCH, layouts=[TENSOR], loss=loss, steps=2)
    assert (caught.value.fault.phase, caught.value.fault.module) == (phase, module)


class Mixture(nn.Module):
    """Compute a mixture of experts; ``mistake``: an expert has more weight than its router gives."""

    def __init__(self, mistake=False, *, state):
        super().__init__()
        router = TopKRouter(D, 4, 2, score="sigmoid", bias_corrected=True, state=state)
        self.before = LayerNorm(D, state=state)
        self.moe = MoE(router, Experts(4, D, HIDDEN, state=state), state=state)
        self.wrong = mistake and state is not None

    def forward(self, x):
        return x + self.moe(self.before(x)) * (1.5 if self.wrong else 1.0)


def test_experts_that_are_dealt_out_are_compared_by_what_their_mixture_gives():
    layouts = [Layout.of(data=2, expert=2, zero=3), Layout.of(context=2, expert=2)]
    batch, cut = {name: x[:, :4] for name, x in BATCH.items()}, {"x": 1, "wanted": 1}
    counted = FunctionLoss(loss, count=numbers, sequence=cut)
    assert_layout_invariant(Mixture, batch, layouts=layouts, loss=counted, steps=2)
    with pytest.raises(LayoutVariance) as caught:
        assert_layout_invariant(partial(Mixture, True), BATCH, layouts=layouts[:1], loss=loss, steps=1)
    assert (caught.value.fault.phase, caught.value.fault.module) == ("forward", "")


class BothEnds(nn.Module):
    """A net that the first and the last stage hold and call; ``mistake``: the last scales what it gives."""

    def __init__(self, mistake=False, *, state):
        super().__init__()
        self.stage = Stage.of(2, state=state)
        self.blocks = nn.ModuleDict({str(i): LayerNorm(D, state=state) for i in self.stage.blocks})
        if self.stage.first or self.stage.last:
            self.ends = Ends(state=state)
        self.wrong = mistake and state is not None

    def forward(self, given=None, *, x):
        given = self.ends(x) if self.stage.first else given
        for block in self.blocks.values():
            given = block(given)
        assert given is not None
        return self.ends(given) * (1.5 if self.wrong else 1.0) if self.stage.last else given


class Ends(nn.Module):
    def __init__(self, *, state):
        super().__init__()
        stated = Declaration((D, D), ends=True, initial=Normal(0.3))
        declare_parameter(self, "weight", stated, state)

    def forward(self, x):
        return F.linear(x, local(self.weight)).tanh()


def test_a_module_that_both_ends_of_a_pipeline_call_is_no_difference():
    assert_layout_invariant(BothEnds, BATCH, layouts=[Layout(pipeline=2)], loss=loss, steps=2)
    with pytest.raises(LayoutVariance, match="the loss of rank 0 is"):
        assert_layout_invariant(
            partial(BothEnds, True), BATCH, layouts=[Layout(pipeline=2)], loss=loss, steps=1, checkpoint=False
        )


def test_what_other_processes_cannot_find_and_what_the_module_refuses_is_refused():
    says = r"is a lambda or lives in another function\. Define it with `def` at the top"
    with pytest.raises(ValueError, match=says):
        assert_layout_invariant(lambda *, state: Net(state=state), BATCH)
    with pytest.raises(BadInput, match=r"loss: expected a loss, .* found tuple"):
        assert_layout_invariant(partial(Otherwise, "pair"), BATCH)
    with pytest.raises(RankError, match="ZeroDivisionError"):
        assert_layout_invariant(partial(Otherwise, "raised"), BATCH, loss=loss)
    with pytest.raises(BadInput, match="that tensor=3 divides, found 16"):
        assert_layout_invariant(Net, BATCH, layouts=[Layout(tensor=3)], checkpoint=False)


def test_a_gradient_that_is_zero_but_for_rounding_is_no_fault():
    for figures in assert_layout_invariant(Pooled, BATCH, clip=1e9).values():
        assert max(figures.gradients, figures.weights) < 1e-10


def test_pieces_are_told_from_parts_and_from_the_whole():
    whole = torch.arange(12.0).view(2, 6)
    a, b = whole.chunk(2, dim=1)

    def kind(*parts):
        return place(whole, parts, tolerance=1e-6).kind

    assert kind(whole, whole) == "whole"
    assert kind(a, b) == "cut"
    assert kind(whole * 0.25, whole * 0.75) == "partial"
    assert kind(whole[:, :4], whole[:, 2:]) == "shared"
    weights = torch.tensor([1, 1, 0.25, 0.25]), torch.tensor([0.75, 0.75, 1, 1])
    assert kind(whole[:, :4] * weights[0], whole[:, 2:] * weights[1]) == "partial"
    assert kind(F.pad(whole, (0, 2))[:, :4], F.pad(whole, (0, 2))[:, 4:]) == "cut"  # padding is not looked at
    assert place(whole, [whole, whole + 1], tolerance=1e-6).note == ""  # no bias that every rank adds
    assert kind(whole, whole + 1) == "differs"
    assert "rank 0 holds piece 1, rank 1 holds piece 0" in place(whole, [b, a], tolerance=1e-6).note
    assert "2 times too large" in place(whole, [2 * whole] * 2, tolerance=1e-6).note
    uneven = place(whole, [whole[:, :4], whole[:, 4:]], tolerance=1e-6)
    assert (uneven.kind, uneven.note) == ("differs", "shape (2, 2) and (2, 4), of (2, 6) on one process")
    assert "shape (3, 3), of (2, 6)" in place(whole, [torch.ones(3, 3)] * 2, tolerance=1e-6).note
