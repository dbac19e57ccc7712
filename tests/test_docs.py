"""Check that the examples in the docs work: a reader of checkpoints that does not use trilith; watching."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from support.configs import TINY_LLAMA, TINY_MIXTRAL
from support.short_runs import run_recipe, tiny_recipe
from transformers import LlamaConfig, LlamaForCausalLM
from trilith.checkpoints import convert
from trilith.cli.app import run
from trilith.layers import routers
from trilith.machine.random_files import write_tokens
from trilith.models import LoraConfig, adapted
from trilith.recipes.recipe import parse_recipe
from trilith.testing import run_parallel
from trilith.training.run_plan import plan

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def shown():
    """The functions that docs/checkpoints.md shows; none needs this library."""
    space = {}
    for code in re.findall(r"```python\n(.*?)```", (DOCS / "checkpoints.md").read_text(), re.DOTALL):
        assert "trilith" not in code
        assert len(code.strip().splitlines()) <= 24
        exec(compile(code, "checkpoints.md", "exec"), space)
    return space


@pytest.fixture
def read(shown):
    reader = shown["read"]
    return reader


def test_the_reader_reads_what_convert_writes(tmp_path, read):
    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA))
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", tensor=4, pipeline=3)
    theirs = model.state_dict()
    for ours, name in (
        ("embed.weight", "model.embed_tokens.weight"),
        ("layers.2.mlp.down.weight", "model.layers.2.mlp.down_proj.weight"),
        ("layers.1.attention.qkv.k.weight", "model.layers.1.self_attn.k_proj.weight"),
    ):
        assert torch.equal(read(str(tmp_path / "out"), ours), theirs[name])


def test_the_reader_reads_what_a_run_writes(tmp_path, read):
    tokens = write_tokens(tmp_path / "tokens")
    raw = tiny_recipe(tmp_path / "run", tokens, steps=1, layout={"tensor": 2, "data": 2, "zero": 1})
    run_parallel(run_recipe, 4, raw)
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    moment = read(str(folder), "optimizer.exp_avg_sq.layers.0.mlp.gate_up.up.weight")
    assert moment.shape == read(str(folder), "layers.0.mlp.gate_up.up.weight").shape == (48, 32)
    assert float(moment.min()) >= 0
    assert float(moment.max()) > 0


def test_the_seal_is_checked_as_shown(tmp_path, shown):
    LlamaForCausalLM(LlamaConfig(**TINY_LLAMA)).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out", tensor=2)
    assert shown["sealed"](str(tmp_path / "out"))
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"tensor": 2', '"tensor": 1'))
    assert not shown["sealed"](str(tmp_path / "out"))


def test_what_is_watched_is_watched_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "watching.md").read_text()
    (recipe,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    held_out = write_tokens(tmp_path / "held-out", seed=1)
    for name in ("run", "other-run"):
        raw = tiny_recipe(tmp_path / name, held_out, steps=2) | tomllib.loads(recipe)
        raw["evaluation"]["tokens"] = str(held_out)  # the ranks are in another folder
        raw["watch"] |= {"trace_steps": [2], "norms": 2}  # sooner
        run_parallel(run_recipe, 1, raw)
    for name in ("metrics.jsonl", "events.jsonl", "norms.jsonl", "tensorboard", "traces"):
        assert (tmp_path / "run" / name).exists(), name
    commands = re.findall(r"^trilith (.*?)(?: #|$)", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert run(shlex.split(command)) == 0
    assert (tmp_path / "run" / "report.html").exists() and (tmp_path / "compared.html").exists()


def test_what_context_parallelism_shows_runs(tmp_path):
    text = (DOCS / "context.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "context.md", "exec"), {})
    (toml,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    layout = parse_recipe(tiny_recipe(tmp_path, tmp_path / "tokens", **tomllib.loads(toml))).layout
    assert (layout.context, layout.ring) == (4, True)


def test_what_is_said_of_experts_runs(tmp_path):
    text = (DOCS / "experts.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "experts.md", "exec"), {})
    toml, _, lora = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    changes = {"model": {"config": TINY_MIXTRAL}, "data": {"global_batch": 16}} | tomllib.loads(toml)
    recipe = parse_recipe(tiny_recipe(tmp_path, tmp_path / "tokens", **changes))
    planned = plan(recipe)
    for _, router in routers(planned.family.on_meta(planned.config)):
        assert router.num_experts % recipe.layout.expert == 0
    assert recipe.experts is not None and recipe.experts.balance == 0.01
    family = adapted(planned.family, LoraConfig.model_validate(tomllib.loads(lora)["lora"]))
    family.check(planned.config, "lora")
    assert len(family.stacks(planned.config)) == 2 * planned.config.num_hidden_layers


def test_the_page_on_new_families_shows_code_tests_and_files_that_exist():
    text, root = (DOCS / "new_family.md").read_text(), DOCS.parent
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert code in (root / "models" / "smollm3.py").read_text()
    files = re.findall(r"`((?:models|testing|tests|layers)/[a-z_0-9/]+\.(?:py|toml))`", text)
    assert len(files) > 12 and [one for one in files if not (root / one).is_file()] == []
    tests = "".join(path.read_text() for path in (root / "tests" / "models").glob("test_*.py"))
    named = re.findall(r"^\| `([a-z_0-9]+)[.`]", text, re.MULTILINE)
    assert len(named) >= 4 and [one for one in named if f"def test_{one.rstrip('_')}" not in tests] == []
