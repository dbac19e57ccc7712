"""``compute = "float8"`` in a recipe: what it says, and its loss over 200 steps."""

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from support.configs import config
from support.short_runs import run_and_listen, run_recipe, tiny_recipe
from trilith.data.token_writer import TokenWriter
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadInput, Layout, ParallelState
from trilith.recipes.recipe import parse_recipe
from trilith.testing import run_parallel
from trilith.training.build import build
from trilith.training.run_plan import plan

WIDE = config("tiny_wide_llama")


def recipe(folder, **changes):
    tokens = write_tokens(folder / "tokens")
    stated = {"dtype": "float32", "compute": "float8", "model": {"config": WIDE}} | changes
    return tiny_recipe(folder / "run", tokens, **stated)


def test_a_gpu_without_float8_is_refused(tmp_path, monkeypatch):
    stated = parse_recipe(recipe(tmp_path, float8_scaling="rowwise"))
    state = ParallelState.stand_in(Layout())
    state.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(BadInput, match=r"compute capability 9.0 or later with float8, found 8.9"):
        build(stated, plan(stated), state)


def test_a_run_says_once_which_weights_stay_in_bf16(tmp_path):
    raw = recipe(tmp_path, steps=2)
    bf16 = raw | {"out": str(tmp_path / "bf16"), "compute": "bfloat16"}
    (steps, said), (usual, plain) = (run_parallel(run_and_listen, 1, one)[0] for one in (raw, bf16))
    losses, others = ([step.loss for step in run] for run in (steps, usual))
    line = (
        "float8: 3 weights in bfloat16 (a side is no multiple of 16): "
        "layers.0.mlp.gate_up.gate, layers.0.mlp.gate_up.up, layers.0.mlp.down"
    )
    assert said.count(line) == 1 and "float8" not in plain
    assert losses != others and losses == pytest.approx(others, rel=0.02)


ROOT = Path(__file__).parents[2]
LAYOUTS = {"one process": {}, "tensor and sequence": {"tensor": 2, "sequence": True}}
LAYOUTS["data, ZeRO 3"] = {"data": 2, "zero": 3}
WINDOW = 20


def write_text(name):
    """Write the pages of the documentation as a token file with a token for each byte."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    with TokenWriter(name, vocab_size=256) as writer:
        for page in pages:
            writer.add(np.frombuffer(page.read_bytes(), dtype=np.uint8).astype(np.int64))
        writer.commit()
    return name


def curve(folder, tokens, layout, **changes):
    """Return the mean losses of a run's windows of 20 steps."""
    raw = tiny_recipe(
        folder,
        tokens,
        steps=200,
        dtype="float32",
        model={"config": config("tiny_llama_of_bytes")},
        layout=layout,
        data={"sequence_length": 64, "global_batch": 8, "micro_batch": 8 // layout.get("data", 1)},
        optimizer={"lr": 3e-3, "warmup": 20, "clip": 1.0},
        checkpoint={"keep": 1},
        **changes,
    )
    steps = run_parallel(run_recipe, parse_recipe(raw).layout.world, raw, timeout=1500)[0]
    losses = [one.loss for one in steps]
    return [fmean(losses[start : start + WINDOW]) for start in range(0, len(losses), WINDOW)]


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16")
    return curve(folder / "run", write_text(folder / "tokens"), {}, compute="bfloat16")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_the_loss_in_float8_stays_beside_that_in_bf16(scaling, layout, bf16, tmp_path):
    tokens = write_text(tmp_path / "tokens")
    found = curve(tmp_path / "run", tokens, LAYOUTS[layout], compute="float8", float8_scaling=scaling)
    print(layout, scaling, *(f"{one / other - 1:+.2%}" for one, other in zip(found, bf16, strict=True)))
    assert bf16[-1] < 0.7 * bf16[0]  # it learns
    assert found == pytest.approx(bf16, rel=0.03)
