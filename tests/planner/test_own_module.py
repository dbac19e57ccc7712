"""A module that is not the zoo's is planned from a trace of it: its bytes, sends and refusals."""

import gc
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from support.strangers import STUBS, T5, VIT, images, sentences
from torch import nn
from torch.nn import functional as F
from trilith.layers import ColumnParallelLinear, VocabParallelEmbedding
from trilith.parallel_state import BadInput, Layout, ParallelState, initialize
from trilith.planner import Work, plan_memory, rank_parameters, step_traffic
from trilith.testing import LiveBytes, collectives_of, run_parallel
from trilith.training import Precision, Step, make_adamw, shard_batch, shard_over_data


def test_the_example_is_planned_and_sends_what_its_layers_send():
    """Attention and feed-forward in each of four blocks, and two cross attentions."""
    state = ParallelState.stand_in(Layout(tensor=2))
    with torch.device("meta"):
        model = T5.T5(state=state)
    sent = step_traffic(Work(state, 16, 6, 1, 1), model, samples=sentences(0), loss=T5.loss)
    count = {traffic.what: traffic.count for traffic in sent if traffic.axis == "tensor"}
    assert count["forward"] == 4 * 2 + 2 + 2 + 2  # sums of row-parallel products; two embeddings; the loss
    assert count["backward"] == 4 * 3 + 2 * 2 + 1  # q and k, v apart; the output layer


class Words(nn.Module):
    """Look tokens up, and multiply them; both layers are used in the other order of their declaration."""

    def __init__(self, state, between=lambda x: x):
        super().__init__()
        self.head = ColumnParallelLinear(16, 8, state=state)
        self.embed = nn.Embedding(8, 16)
        self.between = between

    def forward(self, ids):
        return self.head(self.between(self.embed(ids)))


def total(logits, samples):
    return logits.float().sum(), samples["ids"].numel()


def words(state, **more):
    with torch.device("meta"):
        return Words(state, **more)


IDS = {"ids": torch.zeros(1, 8, dtype=torch.int64)}


@pytest.mark.parametrize("trained", [True, False])
def test_a_backward_is_counted_to_the_first_layer_that_is_trained(trained):
    state = ParallelState.stand_in(Layout(tensor=2))
    model = words(state)
    model.head.requires_grad_(False)
    model.embed.requires_grad_(trained)
    sent = step_traffic(Work(state, 16, 8, 1, 1), model, samples=IDS, loss=total)
    assert sum(traffic.count for traffic in sent if traffic.what == "backward") == trained


@pytest.mark.parametrize("fused", [True, False])
def test_what_a_forward_compiles_is_planned_as_it_is_written(fused):
    work = Work(ParallelState.alone(), 16, 8, 1, 1, fused=fused)
    compiled, plain = (
        plan_memory(work, words(ParallelState.alone(), between=between), samples=IDS, loss=total)
        for between in (lambda x: torch.compile(torch.sin)(x), torch.sin)
    )
    assert compiled == plain


def first_words(x):
    return x[x.sum(-1) > 0]


def scaled(x):
    return x if x.amax() < 1 else x / 2


def as_list(x):
    return x * len(x[0, :, 0].tolist())


@pytest.mark.parametrize(
    ("between", "operator"),
    [(first_words, "nonzero"), (scaled, "aten::_local_scalar_dense"), (as_list, "tolist"),
     (torch.linalg.eigvals, "eig"), (lambda x: x.view(3, -1), "shape '[3, -1]'"),
     (lambda x: F.conv1d(x, x.new_ones(8, 8, 1), x.new_ones(8).double()), "Cast floating samples"),
     (lambda x: sys.exit("enough"), "enough")],
)  # fmt: skip
@pytest.mark.parametrize("fused", [True, False])
def test_a_module_that_no_shapes_can_run_is_refused_by_operator_and_line(between, operator, fused):
    """Also where a branch would be taken, where shapes do not fit, and where the code ends the process."""
    state = ParallelState.alone()
    work = Work(state, 16, 8, 1, 1, fused=fused)
    with pytest.raises(BadInput) as refused:
        plan_memory(work, words(state, between=between), samples=IDS, loss=total)
    line = str(refused.value)
    assert line.startswith("plan: Words: expected") and operator in line and "\n" not in line
    assert f"{Path(__file__).name}:" in line


@pytest.mark.parametrize("name", STUBS)
@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2, "sequence": True}, {"data": 2, "zero": 3}, {"pipeline": 2}]
)
def test_a_module_with_the_asked_names_alone_is_planned(name, layout):
    """Hidden states are what ``hidden_shape`` says, and not what ``Work`` does."""
    stub, layout = STUBS[name], Layout.of(**layout)
    for rank in range(layout.world):
        state = ParallelState.stand_in(layout, rank)
        with torch.device("meta"):
            model = stub.build(state=state)
        work = Work(state, 3, 6, 2, 4 // layout.data, fused=False)
        plan = plan_memory(work, model, samples=stub.batch(0), loss=stub.loss())
        assert plan.moments == 2 * 4 * rank_parameters(model, state).every.trained_sharded
        assert (plan.moments < plan.weights) == (name != "stub") and plan.activations > 0


@pytest.mark.parametrize(
    ("layout", "times"),
    [(Layout.of(data=2, zero=3), 0), (Layout(pipeline=2), 1),
     (Layout(pipeline=2, virtual_stages=2, v_shape=True), 0)],
)  # fmt: skip
def test_a_tied_embedding_is_summed_where_two_ranks_hold_it(layout, times):
    state = ParallelState.stand_in(layout)
    model = nn.ModuleDict({"embed": VocabParallelEmbedding(8, 4, ends=True, state=state)})
    assert rank_parameters(model, state).every.end_tensors == times


def test_a_scalar_is_planned_on_one_data_rank_and_refused_on_more():
    """A temperature, of which FSDP refuses to hold a part."""
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.0))})
    assert rank_parameters(model, ParallelState.alone()).every.trained_sharded == 1
    state = ParallelState.stand_in(Layout.of(data=2))
    for refuses in (
        lambda: rank_parameters(model, state),
        lambda: shard_over_data(model, state, Precision()),
    ):
        with pytest.raises(BadInput, match=r"^scale: shape: expected a dim, .* found \(\). Make it of shape"):
            refuses()


def test_samples_and_loss_are_asked_for():
    state = ParallelState.alone()
    for given, key in (({"loss": total}, "samples"), ({"samples": IDS}, "loss")):
        with pytest.raises(BadInput, match=f"plan: {key}: expected"):
            plan_memory(Work(state, 16, 8, 1, 1), words(state), **given)


def sums_of_a_step(layout):
    """Return the all-reduces of steps of two and of four micro-batches: launched, planned over replicas."""
    counts = []
    state = ParallelState.start(layout)
    model, plain = (VIT.ViT(state=state) for _ in range(2))
    shard_over_data(model, state, Precision())
    initialize(model, 0, state=state)
    step, rows = Step(model, VIT.loss, micro_batch=1, state=state), images(0)
    for count in (2, 4):
        samples = shard_batch({name: x[: count * layout.data] for name, x in rows.items()}, state)
        step(samples)  # which makes the pipeline ready
        model.zero_grad()
        launched = collectives_of(partial(step, samples))["all_reduce"]
        model.zero_grad()
        work = Work(state, 16, 10, 1, count, fused=False)
        with pytest.raises(BadInput, match="before shard_over_data"):  # FSDP would gather the weights
            step_traffic(work, model, samples=rows, loss=VIT.loss)
        sent = step_traffic(work, plain, samples=rows, loss=VIT.loss)
        counts.append((launched, sum(traffic.count for traffic in sent if traffic.axis == "replicas")))
    return counts


@pytest.mark.parametrize("pipeline", [1, 2])
def test_replicas_of_a_module_of_ones_own_sum_at_each_micro_batch(pipeline):
    """The other all-reduces of a step are as many for four micro-batches as for two."""
    layout = Layout.of(pipeline=pipeline, data=2, zero=2, data_replicate=2)
    for (two, planned_two), (four, planned_four) in run_parallel(sums_of_a_step, layout.world, layout):
        assert four - two == planned_four - planned_two > 0


HIDDEN, VOCABULARY, LENGTH = 512, 100, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return self.down(self.up(x))


class Model(nn.Module):
    """Have weights that are much more than activations."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.layers:
            x = block(x)
        return self.head(x)


def next_ids(logits, samples):
    ids = samples["ids"]
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum"), ids.numel()


def peak_over_plan(zero):
    state = ParallelState.start(Layout.of(data=2, zero=zero))
    with torch.device("meta"):
        model = Model()
    work = Work(state, HIDDEN, LENGTH, 1, 1, fused=False)
    ids = torch.randint(VOCABULARY, (1, LENGTH))
    plan = plan_memory(work, model, samples={"ids": ids}, loss=next_ids)
    shard_over_data(model, state, Precision(torch.float32, torch.float32, torch.float32))
    gc.collect()
    with LiveBytes() as memory:
        model.to_empty(device="cpu")
        for one in model.parameters():
            nn.init.normal_(one, std=0.02)
        optimizer, peaks = make_adamw(model, lr=1e-3), []
        for _ in range(3):
            memory.peak = memory.now
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            peaks.append(memory.peak)
            optimizer.zero_grad()
    return min(peaks[1:]) / plan.total


@pytest.mark.parametrize("zero", [2, 3])
def test_the_blocks_that_are_gathered_are_planned(zero):
    """It is not known in which block an instant is, so the plan counts two, and the largest gradient."""
    for found in run_parallel(peak_over_plan, 2, zero, timeout=60):
        assert 0.93 < found < 1.03
