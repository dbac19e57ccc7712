"""Two hundred steps on real text: the loss in float8 stays beside bf16's, in three layouts."""

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from support.short_runs import run_recipe, tiny_recipe
from trilith.data.token_writer import TokenWriter
from trilith.recipes.recipe import parse_recipe
from trilith.testing import run_parallel

ROOT = Path(__file__).parents[2]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LAYOUTS = {
    "one process": {},
    "tensor and sequence": {"tensor": 2, "sequence": True},
    "data, ZeRO 3": {"data": 2, "zero": 3},
}
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
        model={"config": LLAMA},
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
