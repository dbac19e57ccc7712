"""Compiled blocks train as one device's do: in parts, sharded, checkpointed, in stages; names stay."""

import os
from dataclasses import replace

import pytest
import torch
from support.configs import MODELS, TINY_LLAMA, config
from support.layout_cases import COMPARED, Layouts, row
from support.short_runs import tiny_recipe
from support.short_training import Case, first_difference, outcome, train_rank
from torch import nn
from trilith.layers import (
    Attention,
    Experts,
    GatedDeltaNet,
    MoE,
    MultiHeadLatentAttention,
    TopKRouter,
    compile_blocks,
)
from trilith.layers.compile import keep_compiled_code, parts_in_one_graph
from trilith.layers.experts.moe import GatedShared
from trilith.models import family_of
from trilith.models.llama import LlamaBlock
from trilith.parallel_state import BadInput, DeclaredModule, Layout, ParallelState
from trilith.recipes.recipe import Recipe, parse_recipe
from trilith.testing import run_parallel
from trilith.training import build as build_module
from trilith.training.run_plan import plan

#: Traced and differentiated by torch's compiler, not made into C++: that takes minutes.
test_compiled_blocks_equal_one_device = Layouts(
    [
        row(
            "-".join([model, layout, *memory]),
            config(model, layers=3),
            layout,
            asks=COMPARED | {"slow": slow},
            compiled="aot_eager",
            **memory,
        )
        for model, layout, memory, slow in (
            ("llama", "tp2-sp", {"checkpointing": "full"}, True),
            ("gpt2", "dp2-zero3", {"chunk": 5}, False),
            ("llama-tied", "tp2-sp-pp2", {"checkpointing": "every", "documents": True}, False),
            ("mixtral", "dp2-ep2", {}, False),
            ("granitemoehybrid", "dp2-zero3", {}, False),
            ("qwen3_next", "dp2-ep2", {}, True),
            ("gemma2", "cp2", {}, True),
        )
    ],
    at_once=1,
).equal_one_device()


def train_with_few_graphs(case):
    """Train where torch makes three graphs of a function and then stops; its default is 8."""
    with torch._dynamo.config.patch(recompile_limit=3, accumulated_recompile_limit=3):
        return train_rank(case)


def test_adapters_of_more_ranks_than_torch_makes_graphs_are_compiled():
    """Each rank may be another graph of one function."""
    ranks = {f"layers.{block}.self_attn.q_proj": 2 + block for block in range(5)}
    lora = {"r": 1, "target_modules": ["q_proj"], "rank_pattern": ranks}
    case = Case(config("llama", layers=5), lora=lora, steps=1)
    eager, compiled = (
        outcome(run_parallel(train_with_few_graphs, 1, replace(case, compiled=backend), timeout=200))
        for backend in ("", "aot_eager")
    )
    assert first_difference(eager, compiled, tolerance=1e-10) is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"memory": {"checkpointing": "selective"}}, "memory.checkpointing"),
        ({"layout": {"pipeline": 2, "schedule": "zbv"}}, "layout.schedule"),
        ({"debug": {"collectives": True}}, "debug.collectives"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_what_needs_operators_one_by_one_is_refused(changes, key, tmp_path):
    """Or, where the user did not ask for it, not compiled, for a reason that the run gives."""
    raw = tiny_recipe(tmp_path / "run", tmp_path / "tokens", **changes)
    with pytest.raises(BadInput) as error:
        parse_recipe(raw | {"compile": True})
    assert error.value.key == key and "\n" not in str(error.value)
    found = parse_recipe(raw | {"device": "cuda"})
    assert not found.compiles and (found.not_compiled or "").startswith(key)


def test_blocks_are_compiled_by_default_on_a_gpu_and_nowhere_else(tmp_path):
    raw = tiny_recipe(tmp_path / "run", tmp_path / "tokens")
    assert parse_recipe(raw | {"device": "cuda"}).compiles
    assert not parse_recipe(raw | {"device": "cuda", "compile": False}).compiles
    assert not parse_recipe(raw).compiles and parse_recipe(raw | {"compile": True}).compiles


@pytest.mark.parametrize("asked", [True, "auto"])
def test_a_run_compiles_its_blocks_before_anything_wraps_them(asked, tmp_path, monkeypatch):
    calls = []

    def note(blocks, *, or_without):
        calls.append(([(type(block), "forward" in vars(block)) for block in blocks], or_without))

    monkeypatch.setattr(build_module, "compile_blocks", note)
    monkeypatch.setattr(Recipe, "compiles", True)  # as on a GPU
    raw = tiny_recipe(tmp_path / "run", tmp_path / "tokens", memory={"checkpointing": "full"}, compile=asked)
    recipe = parse_recipe(raw | {"device": "cpu"})
    build_module.build(recipe, plan(recipe), ParallelState.alone())
    assert calls == [([(LlamaBlock, False)] * TINY_LLAMA["num_hidden_layers"], asked == "auto")]


@pytest.mark.parametrize(
    ("model", "layout", "whole", "outside"),
    [
        ("llama", Layout.of(tensor=2, sequence=True), True, ()),
        ("mixtral", Layout(), False, (MoE, TopKRouter, Experts)),
        ("deepseek_v2", Layout(), False, (MoE, TopKRouter, Experts)),
        ("qwen3_5_text", Layout(), False, (GatedDeltaNet,)),
        ("llama", Layout.of(context=2), False, (Attention,)),
        ("deepseek_v2", Layout.of(context=2), False, (MultiHeadLatentAttention, MoE, TopKRouter, Experts)),
    ],
    ids=str,
)
def test_a_block_is_compiled_whole_or_in_its_largest_parts_that_are_one_graph(model, layout, whole, outside):
    family = family_of(MODELS[model])
    state = ParallelState.stand_in(layout, 0)
    blocks = [*family.build(family.from_hf(MODELS[model]), state=state).layers.values()]
    parts = {block: [*parts_in_one_graph(block)] for block in blocks}
    assert all(found == [block] for block, found in parts.items()) == whole
    inside = [one for found in parts.values() for part in found for one in part.modules()]
    assert not any(isinstance(one, outside) for one in inside) and len(inside) == len({*inside})
    # All other modules that compute something are in one of the parts.
    held = {id(one) for one in inside}
    for block in blocks:
        for one in block.modules():
            left = id(one) not in held and one is not block and not isinstance(one, outside)
            alone = type(one) is DeclaredModule or isinstance(one, nn.Identity | GatedShared)
            assert not left or alone or not [*one.parameters()]


def test_what_torch_fails_to_compile_runs_without_if_nobody_asked_for_it():
    def refuses(graph, inputs):
        raise ValueError("no such kernel")

    layer = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    expected = layer(x)
    torch.compiler.reset()
    compile_blocks([layer], backend=refuses, or_without=True)
    with pytest.warns(UserWarning, match="does not compile Linear, which runs without: .*refuses"):
        assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x), expected)  # and says so once
    other = nn.Linear(3, 2)
    compile_blocks([other], backend=refuses)
    with pytest.raises(RuntimeError):
        other(x)


def test_compiled_code_is_kept_in_the_user_s_cache_unless_told_where(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # nothing can be written there
    keep_compiled_code()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_blocks([])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "trilith" / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
