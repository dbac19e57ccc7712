"""Recipes with layouts drawn at random: what is legal trains as one device does, the rest is refused.

Legal is what ``plan(parse_recipe(...))`` lets pass, which is what every run goes through before any process
starts. A refusal is one line with both numbers and, where a number is wrong, the nearest that are right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from trilith.parallel_state import BadInput, Layout
from trilith.testing.models import MODELS
from trilith.training.recipe import Recipe, parse_recipe
from trilith.training.run_plan import plan
from trilith.training.sections import LayoutSection

Raw = dict[str, Any]
SCHEDULES = get_args(LayoutSection.model_fields["schedule"].annotation)
COUNTS = {"num_experts", "num_local_experts", "n_routed_experts"}
MIXTURES = {name for name, config in MODELS.items() if COUNTS & config.keys()}
IN_TWO_PARTS = ("interleaved-zero-bubble", "zbv", "dualpipev")
SAMPLES, LENGTH = 8, 16


def factors(ranks: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write a power of two as a product of so many."""
    if parts == 1:
        return [(ranks,)]
    sizes = [2**n for n in range(ranks.bit_length())]
    return [(size, *rest) for size in sizes for rest in factors(ranks // size, parts - 1)]


def cuts(blocks: int, stages: int) -> list[list[int]]:
    """All ways to give each stage at least one of so many blocks."""
    ends = [(0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1)]
    return [[stop - start for start, stop in pairwise(one)] for one in ends]


@st.composite
def recipes(draw: st.DrawFn, ranks: int) -> Raw:
    """A recipe for so many ranks, legal or not; no axis, stage of ZeRO or schedule is drawn more often."""
    axes = ["tensor", "pipeline", "data", "context"]
    layout: Raw = dict(zip(axes, draw(st.sampled_from(factors(ranks, len(axes)))), strict=True))
    model = draw(st.sampled_from(sorted(MODELS)))
    layout |= {
        "zero": draw(st.integers(0, 3)),
        "sequence": draw(st.booleans()),
        "data_replicate": draw(st.sampled_from([1, 1, 2])),
        "context_attention": draw(st.sampled_from(["all-gather", "ring"])),
        "expert": draw(st.sampled_from([1, 2, 4])) if model in MIXTURES else 1,
    }
    if layout["pipeline"] > 1:
        layout["schedule"] = draw(st.sampled_from(SCHEDULES))
        if layout["schedule"].startswith("interleaved"):
            layout["virtual_stages"] = draw(st.sampled_from([2, 2, 3]))
        stages = layout["pipeline"] * LayoutSection.model_validate(layout).stages_of_a_rank
        blocks = MODELS[model].get("num_hidden_layers") or MODELS[model]["n_layer"]
        layout["split"] = draw(st.sampled_from([None, None, *cuts(blocks, stages)]))
    memory: Raw = {}
    if layout.get("schedule") not in IN_TWO_PARTS:
        memory["checkpointing"] = draw(st.sampled_from(["none", "selective", "every", "full"]))
        memory["loss_chunk"] = draw(st.sampled_from([0, 0, 5]))
    return recipe(model, layout, memory, draw(st.sampled_from([1, 1, 2])))


@st.composite
def wild(draw: st.DrawFn) -> Raw:
    """Numbers that mostly make no sense together."""
    size = st.integers(1, 8)
    axes = ("tensor", "pipeline", "data", "data_replicate", "context", "expert", "virtual_stages")
    layout: Raw = {key: draw(size) for key in axes}
    layout |= {"zero": draw(st.integers(0, 3)), "sequence": draw(st.booleans())}
    layout["schedule"] = draw(st.sampled_from(SCHEDULES))
    raw = recipe(draw(st.sampled_from(sorted(MODELS))), layout, {}, draw(size))
    raw["data"] |= {"global_batch": draw(st.integers(1, 64)), "sequence_length": draw(st.integers(1, 64))}
    return raw


def recipe(model: str, layout: Raw, memory: Raw, micro_batch: int) -> Raw:
    data = {"tokens": "-", "sequence_length": LENGTH, "global_batch": SAMPLES, "micro_batch": micro_batch}
    config = {"config": MODELS[model], "init_from": None}
    raw = {
        "out": f"run-{model}",
        "steps": 1,
        "model": config,
        "layout": layout,
        "memory": memory,
        "data": data,
    }
    return raw


def refused(raw: Raw) -> BadInput | None:
    try:
        plan(parse_recipe(raw))
    except BadInput as error:
        return error
    return None


def legal(raw: Raw) -> bool:
    return refused(raw) is None


def parse_layout(raw: Raw) -> Layout:
    return LayoutSection.model_validate(raw["layout"]).layout


def put(raw: Raw, key: str, value: int) -> Raw:
    """The recipe with one number changed; an axis may be named without its section."""
    if key == "micro-batches a step":
        data, layout = raw["data"], parse_layout(raw)
        key, value = "data.global_batch", value * layout.data * data["micro_batch"]
    section, _, name = key.rpartition(".")
    section = section or "layout"
    return {**raw, section: {**raw[section], name: value}}


FIXED = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@settings(FIXED, max_examples=150)
@given(wild())
def test_a_layout_is_legal_or_refused_with_numbers_that_are_E11(raw: Raw) -> None:
    error = refused(raw)
    assume(error is not None)
    assert error is not None
    text = str(error)
    assert "\n" not in text and error.exit_code == 2
    assert error.expected is not None and error.found is not None, text
    assert re.search(r"\d", f"{error.expected}") and re.search(r"\d", f"{error.found}"), text
    assert error.todo, text
    found = re.search(r"Nearest legal(?: ([\w.]+))?: (\d+)(?: or (\d+))?", error.todo)
    assert found is not None, text
    for number in found.groups()[1:]:
        if number is not None:  # what was named is no longer what is wrong
            again = refused(put(raw, found[1] or str(error.key), int(number)))
            assert again is None or (again.key, again.expected) != (error.key, error.expected), text


@pytest.mark.parametrize("schedule", IN_TWO_PARTS)
def test_what_takes_one_backward_is_refused_where_it_comes_in_two_parts(schedule: str) -> None:
    for memory in ({"checkpointing": "selective"}, {"loss_chunk": 5}):
        raw = recipe("llama", {"pipeline": 2, "schedule": schedule}, memory, 1)
        error = refused(raw)
        assert error is not None and error.key == f"memory.{next(iter(memory))}"
        assert schedule in str(error.expected)
        raw["layout"]["schedule"] = "1f1b"
        assert legal(raw)


def run(raw: Raw, assert_same: Callable[..., None]) -> None:
    made: Recipe = parse_recipe(raw)
    assert_same(
        made.out.removeprefix("run-"),
        made.layout.layout,
        schedule=made.layout.schedule,
        split=None if made.layout.split is None else tuple(made.layout.split),
        micro_batch=made.data.micro_batch,
        memory=made.memory,
        samples=SAMPLES,
        length=LENGTH,
        steps=2,
    )


@settings(FIXED, max_examples=5, phases=[Phase.generate])
@given(raw=recipes(4).filter(legal))
def test_a_legal_layout_of_4_ranks_equals_one_device(raw: Raw, assert_same: Callable[..., None]) -> None:
    run(raw, assert_same)


@settings(FIXED, max_examples=1, phases=[Phase.generate])
@given(raw=recipes(8).filter(legal))
def test_a_legal_layout_of_8_ranks_equals_one_device(raw: Raw, assert_same: Callable[..., None]) -> None:
    run(raw, assert_same)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ranks", [4, 8])
@settings(FIXED, derandomize=False, max_examples=150, phases=[Phase.generate])
@given(data=st.data())
def test_many_legal_layouts_equal_one_device(
    ranks: int, assert_same: Callable[..., None], data: st.DataObject
) -> None:
    run(data.draw(recipes(ranks).filter(legal)), assert_same)
