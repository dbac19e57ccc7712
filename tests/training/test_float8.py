"""``compute = "float8"`` in a recipe: what it refuses, what it says, and what a dry run counts."""

from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from support.short_runs import tiny_recipe
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.recipes.recipe import parse_recipe
from trilith.testing import run_parallel
from trilith.training.build import build
from trilith.training.dry_run import dry_run
from trilith.training.run_plan import plan
from trilith.training.trainer import Trainer

WIDE = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def recipe(folder, **changes):
    tokens = write_tokens(folder / "tokens")
    stated = {"dtype": "float32", "compute": "float8", "model": {"config": WIDE}} | changes
    return tiny_recipe(folder / "run", tokens, **stated)


@pytest.mark.parametrize(
    ("changes", "wrong", "found"),
    [
        ({"dtype": "float64"}, "dtype: expected float32 or bfloat16 with compute = float8", "float64"),
        ({"compute": "bfloat16", "float8_scaling": "rowwise"}, 'compute = "float8" beside it', "bfloat16"),
        ({"float8_scaling": "blockwise"}, "float8_scaling", "blockwise"),
        (
            {"layout": {"pipeline": 2, "schedule": "zbv"}},
            "layout.schedule: expected gpipe, 1f1b or interleaved with compute = float8",
            "zbv",
        ),
    ],
)
def test_what_does_not_go_with_float8_is_refused(changes, wrong, found, tmp_path):
    raw = recipe(tmp_path, **changes)
    with pytest.raises(BadInput) as error:
        parse_recipe(raw)
    assert wrong in str(error.value) and found in str(error.value)


def test_a_gpu_without_float8_is_refused(tmp_path, monkeypatch):
    stated = parse_recipe(recipe(tmp_path, float8_scaling="rowwise"))
    state = ParallelState.stand_in(Layout())
    state.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(BadInput, match=r"compute capability 9.0 or later with float8, found 8.9"):
        build(stated, plan(stated), state)


def said_and_lost(raw):
    """Train on this rank; return what it prints, and the losses."""
    stated, said = parse_recipe(raw), StringIO()
    with redirect_stdout(said):
        steps = Trainer(stated, ParallelState.start(stated.layout)).run()
    return said.getvalue(), [one.loss for one in steps]


def test_a_run_says_once_which_weights_stay_in_bf16(tmp_path):
    raw = recipe(tmp_path, steps=2)
    bf16 = raw | {"out": str(tmp_path / "bf16"), "compute": "bfloat16"}
    (said, losses), (plain, others) = (run_parallel(said_and_lost, 1, one)[0] for one in (raw, bf16))
    line = (
        "float8: 3 weights stay in bfloat16 (a side is no multiple of 16): "
        "layers.0.mlp.gate_up.gate, layers.0.mlp.gate_up.up, layers.0.mlp.down"
    )
    assert said.count(line) == 1 and "float8" not in plain
    assert losses != others and losses == pytest.approx(others, rel=0.02)


def test_a_dry_run_counts_what_the_ranks_agree_on(tmp_path):
    layout = {"tensor": 2, "sequence": True}
    config = WIDE | {"intermediate_size": 96}
    found = dry_run(parse_recipe(recipe(tmp_path, layout=layout, model={"config": config})))
    sent = {one.what: one for one in found.rank.traffic}
    # Per block and micro-batch (4 in a step): four linears forward, two backward; a number for each tensor.
    assert (sent["scales of float8"].count, sent["scales of float8"].bytes) == (
        4 * 6,
        4 * 4 * (4 + 2 + 3 + 2 + 3 + 2),
    )
