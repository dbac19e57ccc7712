"""Check the costs that torch's and a user's modules state, and the refusal of modules that state none."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from support.configs import MODELS
from support.families import family_and_config
from torch import nn
from trilith.layers import ColumnParallelLinear, Cost, Tokens, cost_of, cross_entropy_cost, sum_costs
from trilith.parallel_state import BadInput, Layout, ParallelState, initialize
from trilith.planner import Work, model_cost, plan_memory, rank_parameters, step_traffic
from trilith.testing import collectives_of, run_parallel
from trilith.training import ModuleStep, Precision, own_samples, shard_over_data


def example():
    path = Path(__file__).parents[2] / "examples" / "custom_model.py"
    spec = importlib.util.spec_from_file_location("custom_model_to_plan", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def saved(model, forward):
    """Return the bytes that autograd saves in ``forward``, without parameters, ids and inputs of both."""
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.is_floating_point():
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(found.values())


def test_torch_s_own_modules_cost_what_autograd_saves():
    model = nn.Sequential(
        nn.LayerNorm(16), nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16), nn.Dropout(0.1), nn.RMSNorm(16)
    )
    x = torch.randn(2, 8, 16, requires_grad=True)
    found = saved(model, lambda: model(x))
    cost = cost_of(model, Tokens(2, 8, 16, fused=False))
    assert 0.98 < found / cost.kept <= 1
    assert cost.matrices == 2 * 16 * 2 * 16 * 48
    model[1].weight.requires_grad_(False)
    frozen = cost_of(model, Tokens(2, 8, 16, fused=False))
    assert cost.kept - frozen.kept == 2 * 8 * 16 * 4
    assert frozen.trained == cost.trained / 2


def test_a_module_that_says_nothing_is_refused_by_its_name():
    class Mystery(nn.Linear):
        def forward(self, x):
            return super().forward(x).sin()

    config = MODELS["llama"]
    family, made = family_and_config(config)
    model = family.build(made)
    model.layers["0"].mlp = Mystery(2, 2)
    work = Work(ParallelState.alone(), made.hidden_size, 8, 1, 1)
    said = r"layers\.0\.mlp \(Mystery\): cost: expected a method cost\(tokens\).*sum_costs"
    for ask in (plan_memory, step_traffic):
        with pytest.raises(BadInput, match=said):
            ask(work, model)
    with pytest.raises(BadInput, match="LSTM: cost"):
        cost_of(nn.LSTM(2, 2), work.tokens)
    with pytest.raises(BadInput, match="plan: loss: expected a Cost"):
        plan_memory(work, nn.Linear(2, 2))


@pytest.mark.parametrize("name", MODELS)
def test_every_family_has_a_plan_that_grows_with_its_tokens(name):
    family, config = family_and_config(MODELS[name])
    costs = [model_cost(family.on_meta(config), Tokens(rows, 8, config.hidden_size)) for rows in (1, 2)]
    assert 0 < costs[0].kept < costs[1].kept < 2.001 * costs[0].kept
    assert costs[1].matrices == 2 * costs[0].matrices > 0


def test_a_module_of_ones_own_keeps_what_its_plan_says():
    custom = example()
    model, batch = custom.Transcriber(), custom.batch(0, samples=2)
    found = saved(model, lambda: model(source=batch["source"], tokens=batch["tokens"]))
    planned = model.cost(Tokens(2, 8, 32, fused=False)).kept
    assert 0.98 < found / planned <= 1


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tensor=2, sequence=True), Layout(pipeline=2), Layout.of(tensor=2, data=4, zero=3)],
    ids=str,
)
def test_a_module_of_ones_own_has_a_dry_run_in_any_layout(layout):
    custom = example()
    plan, alone = custom.dry_run(layout), custom.dry_run(Layout())
    state = ParallelState.stand_in(layout)
    with torch.device("meta"):
        held = rank_parameters(custom.Transcriber(state=state), state).every
    assert plan.moments == 2 * 4 * held.trained_stored
    assert plan.total > 0 and (layout.world == 1 or plan.total < alone.total)


def test_a_module_of_ones_own_sends_what_its_layers_say():
    """Recurrence and feed-forward: two products in, two out, in each of four blocks; two cross attentions."""
    custom = example()
    state = ParallelState.stand_in(Layout(tensor=2))
    with torch.device("meta"):
        model = custom.Transcriber(state=state)
    work = Work(state, 32, 8, 1, 1)
    loss = cross_entropy_cost(work.tokens, custom.VOCAB, state=state)
    sent = step_traffic(work, model, loss=loss)
    forward = sum(one.count for one in sent if one.what == "forward")
    assert forward == 4 * 2 + 2  # sums of row-parallel products
    assert sum(one.count for one in sent if one.what == "backward") == 4 * 2 + 2 * 2  # q and k, v apart
    assert {one.what for one in sent} >= {"embedding", "output layer", "loss"}


@pytest.mark.parametrize("trained", [True, False])
def test_a_backward_is_counted_to_all_layers_of_a_module_whose_order_is_not_known(trained):
    """The embedding, used first, is stated last."""

    class Late(nn.Module):
        def __init__(self, state):
            super().__init__()
            self.head = ColumnParallelLinear(16, 8, state=state)
            self.embed = nn.Embedding(8, 16)

        def cost(self, tokens):
            return sum_costs(self.children(), tokens)

    state = ParallelState.stand_in(Layout(tensor=2))
    with torch.device("meta"):
        model = Late(state)
    model.head.requires_grad_(False)
    model.embed.requires_grad_(trained)
    sent = step_traffic(Work(state, 16, 8, 1, 1), model, loss=Cost())
    assert sum(one.count for one in sent if one.what == "backward") == trained


def test_a_backward_gives_back_what_a_module_kept_before_it_comes_to_those_before():
    one, other = Cost(kept=1, working=5, making=2), Cost(kept=3, working=1, making=4)
    assert one + other == Cost(kept=4, working=2, making=4, repeated=0)
    assert other + one == Cost(kept=4, working=5, making=3, repeated=0)
    assert one.beside(2) + other == Cost(kept=4, working=4, making=4, repeated=0)
    assert sum_costs([nn.Identity(), nn.ReLU()], Tokens(1, 2, 3)) == Cost(kept=24, working=48, repeated=0)


def sums_of_a_step(layout):
    """Return the all-reduces of steps of two and of four micro-batches: launched, planned over replicas."""
    custom, found = example(), []
    state = ParallelState.start(layout)
    model = shard_over_data(custom.Transcriber(state=state), state, Precision())
    initialize(model, 0, state=state)
    step = ModuleStep(model, custom.loss, micro_batch=1, state=state)
    for count in (2, 4):
        samples = own_samples(custom.batch(0, samples=count * layout.data), state)
        step(samples)  # which makes the pipeline ready
        model.zero_grad()
        launched = collectives_of(partial(step, samples))["all_reduce"]
        model.zero_grad()
        work = Work(state, 32, 8, 1, count, fused=False)
        loss = cross_entropy_cost(work.tokens, custom.VOCAB, state=state)
        planned = sum(one.count for one in step_traffic(work, model, loss=loss) if one.axis == "replicas")
        found.append((launched, planned))
    return found


@pytest.mark.parametrize("pipeline", [1, 2])
def test_replicas_of_a_module_of_ones_own_sum_at_each_micro_batch(pipeline):
    """The other all-reduces of a step are as many for four micro-batches as for two."""
    layout = Layout.of(pipeline=pipeline, data=2, zero=2, data_replicate=2)
    for (two, planned_two), (four, planned_four) in run_parallel(sums_of_a_step, layout.world, layout):
        assert four - two == planned_four - planned_two > 0
