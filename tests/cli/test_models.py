"""``trilith models``: what each family can do is what its modules accept, and a size's facts are computed."""

import json

import pytest
from support.configs import EXPERTS, MODELS
from trilith.cli.app import run
from trilith.models import FAMILIES, published_size, published_sizes
from trilith.planner.flops import flops_per_token
from trilith.recipes.recipe import load_recipe
from trilith.recipes.size_facts import size_facts
from trilith.training.dry_run import dry_run

BUILT = [
    pytest.param(name, marks=[] if name in ("gpt2", "mixtral-8x7b", "llama-3.1-405b") else pytest.mark.slow)
    for name in published_sizes()
]


def printed(capsys, *words):
    assert run(["models", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_family_is_listed_with_what_it_can_do(capsys):
    found = printed(capsys)
    assert found.keys() == FAMILIES.keys()
    with_experts = {MODELS[row]["model_type"] for row in EXPERTS}
    for family, one in found.items():
        assert ("expert" in one["axes"]) == (family in with_experts), family
        assert {"tensor", "pipeline"} <= {*one["axes"]} and one["lora"][0] == "linears", family
    assert {*found["mixtral"]["lora"]} == {"linears", "experts"}
    assert [name for one in found.values() for name in one["sizes"]] == sorted(
        published_sizes(), key=lambda name: [*FAMILIES].index(published_sizes()[name].family.model_type)
    )


def test_a_family_that_refuses_an_axis_is_listed_without_it(capsys, monkeypatch):
    from trilith.models import LlamaConfig
    from trilith.parallel_state import BadInput

    check = LlamaConfig.check_layout

    def no_context(self, layout):
        check(self, layout)
        if layout.context > 1:
            raise BadInput("layout", "context", expected=1, found=layout.context)

    monkeypatch.setattr(LlamaConfig, "check_layout", no_context)
    found = printed(capsys)
    assert "context" not in found["llama"]["axes"] and "context" in found["gpt2"]["axes"]


def test_a_size_is_shown_with_its_costs(capsys):
    found = printed(capsys, "mixtral-8x7b")
    assert found["parameters"] == 46_702_792_704 and found["active_parameters"] == 12_879_925_248
    assert found["weights_bytes"] == 2 * found["parameters"]
    size = published_size("mixtral-8x7b")
    flops = flops_per_token(size.family.on_meta(size.config), found["sequence_length"])
    assert found["flops_per_token"] == {"causal": flops.causal, "full": flops.full}
    assert found["config"] == size.fields
    assert run(["models", "mixtral-8x7b"]) == 0
    said = capsys.readouterr().out
    assert "46,702,792,704, of which a token meets 12,879,925,248" in said and "93.41 GB in bfloat16" in said
    assert f"dry run        {found['dry_run']}" in said and "num_local_experts = 8" in said


def test_a_family_by_name_lists_its_sizes(capsys):
    assert printed(capsys, "qwen3")["qwen3-8b"] == {"parameters": 8_190_735_360}
    assert run(["models", "qwen3"]) == 0
    assert "qwen3-8b      8,190,735,360 parameters" in capsys.readouterr().out


@pytest.mark.parametrize("name", BUILT)
def test_the_dry_run_that_it_suggests_fits_in_its_memory(name):
    facts = size_facts(published_size(name))
    _, _, recipe, *overrides, last = facts.dry_run.split()
    assert last == "--dry-run"
    found = dry_run(load_recipe(recipe, overrides))
    found.check("here")
    assert found.parameters == facts.size.parameters and found.active == facts.active
    assert found.flops == facts.flops


def test_an_unknown_name_is_one_line_with_the_nearest(capsys):
    assert run(["models", "llama3-8b"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "found 'llama3-8b'. Nearest: llama-3-8b" in said
    assert run(["models", "mixtrl"]) == 2
    assert "Nearest: mixtral" in capsys.readouterr().err
