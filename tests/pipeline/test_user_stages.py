"""A module of one's own with several stages a rank: one model under every schedule, or refused.

So are weights that enter a stage at two places.
"""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from trilith.layers import (
    MLP,
    LayerNorm,
    Stage,
    VocabParallelEmbedding,
    checkpoint_blocks,
    valid_tokens,
    vocab_parallel_cross_entropy,
)
from trilith.parallel_state import BadInput, Layout, ParallelState, PeerFailed, initialize
from trilith.parallel_state.engine.weight_gradients import compute_weight_gradients
from trilith.pipeline import Stages
from trilith.pipeline.driver import DrivenStage, Pipeline
from trilith.testing import LayoutVariance, RankError, assert_layout_invariant, run_parallel
from trilith.training import Precision, Step, shard_over_data

LOOP = {"virtual_stages": 2}
SHAPED = {"virtual_stages": 2, "v_shape": True}
SCHEDULES = {"interleaved": LOOP, "interleaved-zero-bubble": LOOP, "zbv": SHAPED, "dualpipev": SHAPED}
VOCAB, D, BLOCKS, LENGTH = 31, 8, 5, 4


class Net(nn.Module):
    """Send one tensor between early stages and two from the third block on; both ends are tied."""

    def __init__(self, block=partial(MLP, D, 2 * D), *, state=None):
        super().__init__()
        self.stage = Stage.of(BLOCKS, state=state)
        if self.stage.first or self.stage.last:
            self.embed = VocabParallelEmbedding(VOCAB, D, ends=True, state=state)
        here = self.stage.blocks
        self.blocks = nn.ModuleDict({str(i): block(state=state) for i in here})
        self.norms = nn.ModuleDict({str(i): LayerNorm(D, state=state) for i in here})

    def forward(self, x=None, memory=None, *, tokens, stage=None):
        stage = stage or self.stage
        x = self.embed(tokens) if stage.first else x
        for i in map(str, stage.blocks):
            memory = x if i == "2" else memory
            x = x + self.blocks[i](self.norms[i](x) if memory is None else self.norms[i](x) * memory)
        assert x is not None
        if not stage.last:
            return x if memory is None else (x, memory)
        return self.embed.project(x)


def loss(y, samples, *, state=None):
    labels = samples["labels"]
    return vocab_parallel_cross_entropy(y, labels, VOCAB, state=state).sum(), valid_tokens(labels)


BATCH = {
    name: torch.randint(VOCAB, (8, LENGTH), generator=torch.Generator().manual_seed(seed))
    for seed, name in enumerate(("tokens", "labels"))
}


class Faulty(Net):
    """The third block, on the way back up or in the second round, is another than elsewhere."""

    def forward(self, x=None, memory=None, *, tokens, stage=None):
        out = super().forward(x, memory, tokens=tokens, stage=stage)
        return out if stage is None or stage.number != 2 else (out[0] * 1.5, out[1])


def test_where_a_stage_differs_is_named():
    layout = Layout(pipeline=2, virtual_stages=2)
    with pytest.raises(LayoutVariance) as caught:
        assert_layout_invariant(Faulty, BATCH, layouts=[layout], loss=loss, steps=1, checkpoint=False)
    assert "what it gives to norms.4 differs" in str(caught.value)


class Stageless(nn.Module):
    def forward(self, x, *, stage=None):
        return x


def test_what_cannot_run_several_stages_is_refused_with_both_numbers():
    state = ParallelState.stand_in(Layout(pipeline=2, virtual_stages=2))

    def step(model, schedule="interleaved"):
        Step(model, loss, micro_batch=1, schedule=schedule, state=state)

    step(Net(state=state))
    for schedule, says in {
        "1f1b": "virtual_stages: expected 1 with 1f1b, found 2",
        "zbv": "virtual_stages: expected 2 with zbv",
        "zigzag": "schedule: expected one of gpipe, 1f1b, interleaved",
    }.items():
        with pytest.raises(BadInput, match=says):
            step(Net(state=state), schedule)
    with pytest.raises(BadInput, match="a Stage of virtual_stages=2 parts, found none"):
        step(Stageless())
    with pytest.raises(BadInput, match=r"model.stage: expected parts \[0, 2\], found \[0\]"):
        step(Net())


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "interleaved-zero-bubble"])
def test_selective_checkpointing_is_refused_where_a_backward_has_two_parts(schedule):
    state = ParallelState.stand_in(Layout(pipeline=2, **SCHEDULES[schedule]))
    model = Net(state=state)
    checkpoint_blocks(enumerate(model.blocks.values()), "selective")
    with pytest.raises(BadInput, match=f"memory.checkpointing: expected none with .*{schedule}.*selective"):
        Pipeline(Stages(model, state), schedule, 4, 1)


def steps_of_shapes(lengths, samples):
    """Return the losses of steps in which two data ranks have rows of these lengths, and so many samples."""
    state = ParallelState.start(Layout.of(pipeline=2, data=2, zero=3))
    torch.manual_seed(0)
    model = shard_over_data(Net(state=state).double(), state, Precision(*[torch.float64] * 3))
    initialize(model, 0, state=state)
    step = Step(model, loss, micro_batch=1, state=state)
    found = []
    for both in lengths:
        length, count = both[state.data_index], samples[state.data_index]
        tokens = torch.arange(count * length).view(count, length) % VOCAB
        model.zero_grad()
        found.append(float(step({"tokens": tokens, "labels": (tokens + 1) % VOCAB})))
    return found


class Exhausted(Net):
    """Run out of memory in a step, or in the ``trial`` run before it on the last rank."""

    def __init__(self, trial, *, state):
        super().__init__(state=state)
        self.trial = trial

    def forward(self, x=None, memory=None, *, tokens, stage=None):
        if torch.is_grad_enabled() or (self.trial and self.stage.last):
            raise torch.OutOfMemoryError("of this stage")
        return super().forward(x, memory, tokens=tokens, stage=stage)


def step_of_the_exhausted(trial):
    state = ParallelState.start(Layout(pipeline=2))
    model = Exhausted(trial, state=state)
    initialize(model, 0, state=state)
    Step(model, loss, micro_batch=2, schedule="gpipe", state=state)(BATCH)


def test_what_a_stage_raises_in_a_step_is_told_as_it_is():
    for trial in (False, True):
        with pytest.raises(RankError) as error:
            run_parallel(step_of_the_exhausted, 2, trial, timeout=60)
        assert isinstance(error.value.cause, torch.OutOfMemoryError)
    (other,) = (failure.cause for failure in error.value.failures if isinstance(failure.cause, PeerFailed))
    assert str(other) == "stage 1 failed in its trial run: OutOfMemoryError: of this stage"


def left_by_first_parts():
    """Return the tensors at a stage's ends that the first parts of backwards leave to the second ones."""
    state = ParallelState.start(Layout.of(pipeline=2, **SHAPED))
    model = shard_over_data(Net(state=state).double(), state, Precision(*[torch.float64] * 3))
    initialize(model, 0, state=state)
    whole, left = DrivenStage.backward_one_chunk, list[torch.Tensor | None]()

    def first_part(stage, number, loss=None, full_backward=True, last_backward=False):
        states = getattr(stage, "_forward_chunk_states", None)  # since torch 2.15
        inputs = stage.fwd_cache[number][1] if states is None else states[number].input_values
        whole(stage, number, loss, full_backward, last_backward)
        if not full_backward and not stage.is_first:
            left.extend(x.grad for x in inputs)
            left.extend(x for ends in (*stage.backward_state[number][2:],) for x in ends)

    with mock.patch.object(DrivenStage, "backward_one_chunk", first_part):
        Step(model, loss, micro_batch=2, schedule="zbv", state=state)(BATCH)
    return len(left), sum(x is not None for x in left)


def test_the_first_part_of_a_backward_leaves_no_gradient_of_a_stage_s_ends_to_the_second():
    for count, alive in run_parallel(left_by_first_parts, 2, timeout=60):
        assert count and not alive


def test_shapes_may_change_on_one_data_rank_alone():
    """The trial run gathers weights under ZeRO 3, so all data ranks make it or none does."""
    changing = run_parallel(steps_of_shapes, 4, [(4, 4), (4, 6), (5, 6)], (2, 2), timeout=60)
    fresh = [run_parallel(steps_of_shapes, 4, [one], (2, 2), timeout=60)[0][0] for one in [(4, 6), (5, 6)]]
    assert len({tuple(one) for one in changing}) == 1
    assert changing[0][1:] == pytest.approx(fresh, rel=1e-12)


def test_data_ranks_with_different_numbers_of_samples_are_refused_alike():
    with pytest.raises(RankError) as error:
        run_parallel(steps_of_shapes, 4, [(4, 4)], (2, 4), timeout=60)
    said = {str(failure.cause) for failure in error.value.failures}
    assert len(error.value.failures) == 4 and len(said) == 1
    assert "the same number on each data rank, found from 2 to 4" in said.pop()


class AddedTwice(nn.Module):
    """``c`` is added together with ``a`` and with ``b``."""

    def __init__(self, *, state):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(D)) for _ in range(3))

    def forward(self, x):
        x = x + (self.a + self.c) * x.cos()
        return x + (self.b + self.c) * x.sin()


class BiasAndGate(nn.Module):
    """A linear layer's bias also gates its output."""

    def __init__(self, *, state):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        return x + self.linear(x) * self.linear.bias.sigmoid()


def strange_blocks():
    """Each kind under two of the four schedules; at night under all of them, and with each stage of ZeRO."""
    names = [*SCHEDULES]
    for block, first in ((AddedTwice, names[2:]), (BiasAndGate, names[:2])):
        for name in names:
            drawn = name in first
            slow = [] if drawn else [pytest.mark.slow]
            yield pytest.param(block, name, {}, id=f"pipeline-{name}-{block.__name__}", marks=slow)
            for zero in range(4):
                more, why = {"data": 2, "zero": zero}, f"zero{zero}-{name}-{block.__name__}"
                yield pytest.param(block, name, more, id=why, marks=pytest.mark.slow)


@pytest.mark.parametrize(("block", "schedule", "more"), [*strange_blocks()])
def test_strange_blocks_train_as_on_one_process(block, schedule, more):
    layout = Layout.of(pipeline=2, **SCHEDULES[schedule], **more)
    how = {"loss": loss, "schedule": schedule, "steps": 2, "checkpoint": False}
    figures = assert_layout_invariant(partial(Net, block), BATCH, layouts=[layout], **how)
    assert figures[layout].weights < 1e-10


def test_a_weight_that_no_gradient_comes_to_gets_none_in_the_second_part_of_a_backward():
    """As behind a function whose backward returns ``None``; ``Step(unused=...)`` allows such weights."""
    weight = nn.Parameter(torch.ones(2))
    params, made = {get_gradient_edge(weight).node}, weight * 2
    group = {"params": params, "intermediates": [made.grad_fn], "grads": [(None,)]}
    compute_weight_gradients([weight], [group])
    assert weight.grad is None


def test_the_second_part_of_a_backward_hands_each_gradient_to_the_weight_s_hook():
    """It sums gradients of several micro-batches in another dtype than they are made in."""
    weight, sums = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), []

    def take(parameter):
        sums.append(parameter.grad.float())
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(take)
    for _ in range(2):
        params, made = {get_gradient_edge(weight).node}, weight * 2
        group = {"params": params, "intermediates": [made.grad_fn], "grads": [(torch.ones_like(made),)]}
        compute_weight_gradients([weight], [group])
    assert weight.grad is None
    assert [grad.tolist() for grad in sums] == [[2, 2], [2, 2]]
