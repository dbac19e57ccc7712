"""Recipes with layouts drawn at random: what is legal trains as one device does, the rest is refused.

Legal is what ``plan(parse_recipe(...))`` lets pass, which is what every run goes through before any process
starts. A refusal is one line with both numbers and, where a number is wrong, the nearest that are right.
"""

import os
import re
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import prod
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from support.configs import MODELS
from support.layout_cases import Layouts, Row, refused
from support.short_training import Case
from trilith.recipes.recipe import parse_recipe
from trilith.recipes.sections import LayoutSection

Raw = dict[str, Any]
AXES = ("tensor", "pipeline", "data_shard", "data_replicate", "context")
SCHEDULES = get_args(LayoutSection.model_fields["schedule"].annotation)
COUNTS = {"num_experts", "num_local_experts", "n_routed_experts"}
MIXTURES = {name for name, config in MODELS.items() if COUNTS & config.keys()}
IN_TWO_PARTS = ("interleaved-zero-bubble", "zbv", "dualpipev")
#: Families that are drawn with multi-token prediction.
PREDICTS = {"deepseek_v3", "glm4_moe"}
SAMPLES, LENGTH = 8, 16

#: Patterns, over our names and Hugging Face's, of what is frozen: an end, some blocks, all but one block, all
#: but the norms.
FROZEN = ("embed|wte", r"^layers\.[01]\.", r"^(?!.*(layers|h)\.2\.)", "^(?!.*(norm|ln_))")
LORA = [
    {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
    {"r": 4, "target_modules": "all-linear", "layers_to_transform": [2]},
]

#: Of the slow test: cases of 4 and of 8 ranks, and which ones; seeds share no case, so that a campaign can be
#: cut into parts.
COUNTS_DRAWN = {4: int(os.environ.get("DRAWN_4", "60")), 8: int(os.environ.get("DRAWN_8", "12"))}
SEED = int(os.environ.get("DRAWN_SEED", "1"))


@dataclass(frozen=True)
class Drawn:
    """Hold a drawn run: its recipe, and adapters, which a recipe only takes for weights on disk."""

    name: str
    raw: Raw
    lora: Raw | None


def factors(ranks, parts):
    """Return all ways to write a power of two as a product of so many factors."""
    if parts == 1:
        return [(ranks,)]
    sizes = [2**n for n in range(ranks.bit_length())]
    return [(size, *rest) for size in sizes for rest in factors(ranks // size, parts - 1)]


def cuts(blocks, stages):
    """Return all ways to give each stage at least one of so many blocks."""
    ends = [(0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1)]
    return [[stop - start for start, stop in pairwise(one)] for one in ends]


def draw(ranks, seed, number):
    """Draw the legal case of this number; it depends on nothing else, so that it can be run alone."""
    random = Random(f"{ranks} {seed} {number}")
    while True:
        sizes, schedule = sizes_of(ranks, random), random.choice(SCHEDULES)
        for _ in range(20):  # so that what narrows the rest is not drawn less often
            raw, lora = recipe_of(sizes, schedule, random), None
            if not raw["optimizer"]["groups"] and random.random() < 0.2:
                lora = random.choice(LORA)
            if legal(raw):
                return Drawn(f"{ranks}-ranks-seed{seed}-number{number}", raw, lora)


def sizes_of(ranks, random):
    """Draw the axes of so many ranks.

    Layouts with replicas, and with as many shards and stages as there is room for, are drawn more often than
    their share; no other axis is.
    """
    found = [dict(zip(AXES, one, strict=True)) for one in factors(ranks, len(AXES))]
    return random.choice(most_of_replicas(found) if random.random() < 0.3 else found)


def recipe_of(sizes, schedule, random):
    """Draw a recipe for these axes, legal or not; ``schedule`` is used if there is a pipeline."""
    layout = {key: sizes[key] for key in ("tensor", "pipeline", "context")}
    shard, replicas = sizes["data_shard"], sizes["data_replicate"]
    model = random.choice(sorted(MODELS))
    layout |= {
        "data": shard * replicas,
        "data_replicate": replicas,
        "zero": random.choice([1, 2, 3] if shard > 1 else [0, 1, 2, 3]),
        "sequence": random.random() < 0.5,
        "ring": random.choice([False, True]),
        "expert": random.choice([1, 2, 4]) if model in MIXTURES else 1,
    }
    if layout["pipeline"] > 1:
        layout["schedule"] = schedule
        if schedule.startswith("interleaved"):
            layout["virtual_stages"] = random.choice([2, 2, 3])
        cut = {key: layout[key] for key in ("pipeline", "schedule", "virtual_stages") if key in layout}
        stages = LayoutSection.model_validate(cut).layout.stages
        blocks = MODELS[model].get("num_hidden_layers") or MODELS[model]["n_layer"]
        layout["split"] = random.choice([None, None, *cuts(blocks, stages)])
    memory = {"offload": random.random() < 0.15}
    if layout.get("schedule") not in IN_TWO_PARTS:
        memory["checkpointing"] = random.choice(["none", "selective", "every", "full"])
        memory["loss_chunk"] = random.choice([0, 0, 5])
    raw = recipe(model, layout, memory, random.choice([1, 1, 2]))
    raw["data"]["global_batch"] = 2 * prod(sizes.values())  # room for every schedule's micro-batches
    frozen = random.choice(FROZEN) if random.random() < 0.3 else None
    raw["optimizer"] = {"groups": [] if frozen is None else [{"match": frozen, "freeze": True}]}
    return raw


def most_of_replicas(sizes):
    """Choose the layouts with replicas that have most of these axes: shards, replicas, a pipeline."""

    def several(one):
        return sum(one[axis] > 1 for axis in ("data_shard", "data_replicate", "pipeline"))

    most = max(map(several, sizes))
    return [one for one in sizes if one["data_replicate"] > 1 and several(one) == most]


@st.composite
def wild(draw):
    """Draw numbers that mostly make no sense together."""
    size = st.integers(1, 8)
    axes = ("tensor", "pipeline", "data", "data_replicate", "context", "expert", "virtual_stages")
    layout = {key: draw(size) for key in axes}
    layout |= {"zero": draw(st.integers(0, 3)), "sequence": draw(st.booleans())}
    layout["schedule"] = draw(st.sampled_from(SCHEDULES))
    raw = recipe(draw(st.sampled_from(sorted(MODELS))), layout, {}, draw(size))
    raw["data"] |= {"global_batch": draw(st.integers(1, 64)), "sequence_length": draw(st.integers(1, 64))}
    return raw


def recipe(model, layout, memory, micro_batch):
    data = {"tokens": "-", "sequence_length": LENGTH, "global_batch": SAMPLES, "micro_batch": micro_batch}
    predicts = model in PREDICTS
    stated = {"config": MODELS[model] | ({"mtp": True} if predicts else {}), "mtp": 0.3 if predicts else None}
    run = {"out": f"run-{model}", "steps": 1, "model": stated}
    return run | {"layout": layout, "memory": memory, "data": data}


def legal(raw):
    return refused(raw) is None


def put(raw, key, value):
    """Return the recipe with one number changed; an axis may be named without its section."""
    if key == "micro-batches a step":
        data, layout = raw["data"], LayoutSection.model_validate(raw["layout"]).layout
        key, value = "data.global_batch", value * layout.data * data["micro_batch"]
    section, _, name = key.rpartition(".")
    section = section or "layout"
    return {**raw, section: {**raw[section], name: value}}


FIXED = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@example(recipe("llama", {"pipeline": 4, "schedule": "zbv"}, {}, 1))  # whose blocks are too few for 8 stages
@settings(FIXED, max_examples=150)
@given(wild())
def test_a_layout_is_legal_or_refused_with_numbers_that_are_E11(raw):
    error = refused(raw)
    assume(error is not None)
    assert error is not None
    text = str(error)
    assert "\n" not in text and error.exit_code == 2
    assert error.expected is not None and error.found is not None, text
    assert re.search(r"\d", f"{error.expected}") and re.search(r"\d", f"{error.found}"), text
    assert error.todo, text
    found = re.search(r"Nearest legal(?: ([^:]+))?: (\d+)(?: or (\d+))?", error.todo)
    assert found is not None, text
    for number in found.groups()[1:]:
        if number is not None:  # what was named is no longer what is wrong
            again = refused(put(raw, found[1] or str(error.key), int(number)))
            assert again is None or (again.key, again.expected) != (error.key, error.expected), text


@pytest.mark.parametrize("schedule", IN_TWO_PARTS)
def test_what_takes_one_backward_is_refused_where_it_comes_in_two_parts(schedule):
    for memory in ({"checkpointing": "selective"}, {"loss_chunk": 5}):
        raw = recipe("llama", {"pipeline": 2, "schedule": schedule}, memory, 1)
        error = refused(raw)
        assert error is not None and error.key == f"memory.{next(iter(memory))}"
        assert schedule in str(error.expected)
        raw["layout"]["schedule"] = "1f1b"
        assert legal(raw)


RECORDS = Layouts([])


def assert_one_device_s_training(drawn):
    """Assert it, and that each rank sends what is planned."""
    print(drawn)
    made = parse_recipe(drawn.raw)
    groups = made.optimizer.groups
    case = Case(
        made.model.config,
        made.layout,
        mtp=made.model.mtp or 0.0,
        schedule=made.layout_section.schedule,
        split=None if made.layout_section.split is None else tuple(made.layout_section.split),
        micro_batch=made.data.micro_batch,
        memory=made.memory,
        samples=made.data.global_batch,
        length=LENGTH,
        frozen=groups[0].match if groups else None,
        lora=drawn.lora,
        clip=1e-3 if groups or drawn.lora else 0.05,
    )
    record = RECORDS.record(Row(drawn.name, case))
    record.assert_equal(1e-10)
    for rank, planned in zip(record.ranks, record.plans, strict=True):
        assert rank.sent == planned.sends


#: Cases of every run, and slow ones. Eight ranks are slow here; ``test_more_choices`` has some in every run.
OFTEN, SELDOM = [(4, 0, 0), (4, 0, 2)], [(4, 0, 1), (8, 0, 0)]
SELDOM += [(ranks, SEED, number) for ranks, count in COUNTS_DRAWN.items() for number in range(count)]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in SELDOM]


# Cases are drawn in the test, not where these are collected: a draw plans many recipes.
@pytest.mark.parametrize("case", [*OFTEN, *SLOW], ids=str)
def test_a_legal_layout_equals_one_device(case):
    assert_one_device_s_training(draw(*case))
