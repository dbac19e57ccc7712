"""A plan from one block of each kind is the plan from every block, and is cheap however many there are."""

import random
from functools import partial
from unittest.mock import patch

import pytest
import torch
from support.configs import MODELS
from support.families import family_and_config
from support.plans import shared_pieces
from torch import nn
from trilith.layers import Stage
from trilith.models import LoraConfig, adapted, family_of, published_size
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.planner import Asked, Work, plan_memory, rank_parameters, step_traffic
from trilith.planner.communication import traffic_of
from trilith.planner.memory import memory_of
from trilith.planner.sampled_model import SampledModel, sampled
from trilith.simulation.kinds_of_blocks import block_kinds, build_one_of_each_kind

LAYOUTS = [
    Layout(),
    Layout.of(tensor=2, sequence=True, data=3, zero=3),
    Layout.of(pipeline=2, data=2),
    Layout.of(pipeline=2, virtual_stages=2, v_shape=True),
    Layout.of(context=2, ring=True, data=2, zero=2, expert=2),
]


def fits(model, layout):
    family = family_of(model)
    try:
        return bool(family.stages_on_meta(family.from_hf(model), layout))
    except BadInput:
        return False


#: A family whose last stage holds more blocks and, as the first one, the embedding.
FURTHER = MODELS["deepseek_v3"] | {"mtp": True, "num_nextn_predict_layers": 2}


def like(plan, other):
    """Tell whether two plans differ by a few numbers at most, which are made once for several blocks."""
    return all(abs(size - vars(other)[kind]) <= 16 for kind, size in vars(plan).items())


def assert_planned_alike(alike, work, model, sample):
    """Parameters, gradients, moments, activations and traffic; return the planned parameters."""
    held, costs = sample.parameters(work.state), sample.costs(work)
    memory = memory_of(work, held, costs)
    with patch("trilith.planner.sampled_model.ModelPieces", partial(shared_pieces, alike)):
        assert like(memory, plan_memory(work, model))
        expected = step_traffic(work, model)
    found = traffic_of(work, held, costs)
    assert sorted(map(str, found)) == sorted(map(str, expected))
    return held


def of_families(names, cuts):
    """Return parameters of a test: a third of the names, drawn, each with a drawn cut; all at night."""
    few = random.Random(0).sample(names, len(names) // 3)
    drawn = [pytest.param(name, [random.Random(name).choice(cuts)], id=name) for name in few]
    return [*drawn, *(pytest.param(name, cuts, id=f"{name} all", marks=pytest.mark.slow) for name in names)]


@pytest.mark.parametrize(
    ("name", "layouts"),
    of_families([*MODELS, "multi-token prediction"], LAYOUTS),
)
def test_build_one_of_each_kind_plans_what_all_blocks_plan(name, layouts):
    """Equal for each stage of each layout; on one rank, for a family that cannot be cut as drawn."""
    raw = MODELS.get(name, FURTHER)
    family, config = family_and_config(raw)
    for layout in [layout for layout in layouts if fits(raw, layout)] or LAYOUTS[:1]:
        sample = sampled(family, config, layout)
        for stage, model in enumerate(family.stages_on_meta(config, layout)):
            state = ParallelState.stand_in(layout, layout.first_rank(stage))
            how = {"schedule": "zbv" if layout.v_shape else "1f1b", "checkpointing": "selective"}
            work = Work(state, config.hidden_size, 64, 2, 4, compute=2, **how)
            held = assert_planned_alike(name, work, model, sample)
            assert held.every == rank_parameters(model, state).every
            assert held.every.unsharded + held.every.buffers == sum(p.numel() for p in model.parameters())


def test_adapters_are_planned_on_build_one_of_each_kind():
    raw = MODELS["llama"]
    lora = LoraConfig(r=4, target_modules=("q_proj", "down_proj"), layers_to_transform=(1,))
    family = adapted(family_of(raw), lora)
    config = family.from_hf(raw)
    assert len(set(block_kinds(family, config))) == 2
    for layout in (Layout(), Layout.of(tensor=2, data=2, zero=3)):
        state = ParallelState.stand_in(layout)
        work = Work(state, config.hidden_size, 64, 2, 4, compute=2)
        model = family.build(config, state=state, base_dtype=torch.bfloat16)
        sample = sampled(family, config, layout, Asked(frozen=torch.bfloat16))
        assert_planned_alike("adapters", work, model, sample)


def constructions(size, layout):
    """Count the modules that are made to plan every stage of a layout of a model whose kinds are known."""
    raw = published_size(size).with_fields({})
    family, config = family_and_config(raw)
    block_kinds(family, config)
    made = []
    plain = nn.Module.__init__

    def count(self, *args, **kwargs):
        made.append(type(self))
        plain(self, *args, **kwargs)

    cut = Layout(tensor=layout.tensor, sequence=layout.sequence)
    with patch.object(nn.Module, "__init__", count):
        sample = SampledModel(family, build_one_of_each_kind(family, config, cut))
        blocks = sum(type(sample.block(0)) is kind for kind in made)
        for stage in range(layout.pipeline):
            state = ParallelState.stand_in(layout, layout.first_rank(stage))
            work = Work(state, config.hidden_size, 8192, 1, 16, compute=2)
            memory_of(work, sample.parameters(state), sample.costs(work))
    assert blocks == 1
    return len(made)


def test_a_plan_takes_as_many_modules_for_sixteen_thousand_ranks_as_for_one_node():
    """A block of Llama and the ends have 23 modules; their lists are made where something new is asked."""
    small = constructions("llama-3.1-405b", Layout.of(tensor=8, sequence=True, pipeline=16))
    large = constructions("llama-3.1-405b", Layout.of(tensor=8, sequence=True, pipeline=16, data=128, zero=1))
    assert small == large == 23 + 2
    assert large == constructions("llama-3.1-8b", Layout.of(tensor=8, sequence=True, pipeline=16))


def test_alike_blocks_are_one_kind_and_others_are_not():
    for size, kinds in (("llama-3.1-405b", 1), ("llama-3.2-1b", 1)):
        raw = published_size(size).with_fields({})
        assert len(set(block_kinds(family_of(raw), family_of(raw).from_hf(raw)))) == kinds
    glm = family_of(MODELS["glm4_moe"])
    assert len(set(block_kinds(glm, glm.from_hf(MODELS["glm4_moe"])))) == 2  # the first is dense
    gemma = family_of(MODELS["gemma2"])
    assert len(set(block_kinds(gemma, gemma.from_hf(MODELS["gemma2"])))) == 2  # every other has a window


def test_a_layout_that_cannot_cut_the_model_is_refused():
    raw = MODELS["llama"]
    family = family_of(raw)
    with pytest.raises(BadInput, match="tensor"):
        sampled(family, family.from_hf(raw), Layout.of(tensor=7))
    whole = sampled(family, family.from_hf(raw), Layout())
    with pytest.raises(BadInput, match="pipeline"):
        whole.parameters(ParallelState.stand_in(Layout.of(pipeline=64)))
    assert Stage.of(len(whole.kinds)).last
