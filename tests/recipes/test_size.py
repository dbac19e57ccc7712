"""A recipe that names a published size trains and plans the model of that config."""

import json

import pytest
from support.configs import TINY_LLAMA
from support.short_runs import tiny_recipe, train
from trilith.checkpoints import read_source
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens
from trilith.models import GPT2Config, published_size
from trilith.recipes.recipe import parse_recipe, read_config
from trilith.training.dry_run import dry_run

SMALL = {"vocab_size": 131, "num_hidden_layers": 2}


def recipe_of(tmp_path, model, **changes):
    return {**tiny_recipe(tmp_path / "run", tmp_path / "tokens", **changes), "model": model}


def test_a_dry_run_of_a_size_counts_the_published_parameters(tmp_path):
    write_tokens(tmp_path / "tokens")
    found = dry_run(parse_recipe(recipe_of(tmp_path, {"size": "llama-3.2-1b"}, layout={"tensor": 8})))
    assert found.parameters == 1_235_814_400
    assert found.notes == []


def test_fields_beside_a_size_replace_its_own_under_each_of_their_names(tmp_path):
    for fields in ({"n_layer": 3}, {"num_hidden_layers": 3}):
        model = parse_recipe(recipe_of(tmp_path, {"size": "gpt2", "config": fields})).model
        config = GPT2Config.from_hf(read_config(model))
        assert config == published_size("gpt2").config.model_copy(update={"num_hidden_layers": 3})


def test_a_run_of_a_size_writes_every_field_into_its_checkpoints(tmp_path):
    write_tokens(tmp_path / "tokens")
    raw = recipe_of(tmp_path, {"size": "smollm2-135m", "config": SMALL}, steps=1, dtype="float32")
    train(raw)
    source = read_source(tmp_path / "run")
    wanted = published_size("smollm2-135m")
    assert source.model_config == wanted.config.model_copy(update=SMALL)
    assert set(wanted.config.model_dump(exclude=set(type(wanted.config).HARMLESS))) <= {
        *source.config,
        "rope_scaling",
    }
    assert run(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert {key: written[key] for key in wanted.fields} == {**wanted.fields, **SMALL}


@pytest.mark.parametrize("model", [{"size": "llama-3.2-1b"}, {"config": TINY_LLAMA}], ids=["size", "config"])
def test_keys_that_a_family_reads_or_knows_to_be_harmless_are_accepted(tmp_path, model):
    more = {"rope_theta": 5e5, "use_sliding_window": False, "bos_token_id": 1}
    config = {"config": model.get("config", {}) | more}
    assert read_config(parse_recipe(recipe_of(tmp_path, model | config)).model)["rope_theta"] == 5e5
