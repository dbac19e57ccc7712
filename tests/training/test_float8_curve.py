"""Two hundred steps on real text: the loss in float8 stays beside bf16's, in three layouts."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from trilith.data.token_writer import TokenWriter
from trilith.recipes.recipe import parse_recipe
from trilith.testing import run_parallel
from trilith.testing.short_runs import run_recipe, tiny_recipe

ROOT = Path(__file__).parents[2]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor": 2, "sequence": True},
    "data": {"data": 2, "zero": 3},
}
WINDOW = 20


def write_text(name: Path, text: bytes) -> Path:
    """Write a token file with a token for each byte."""
    with TokenWriter(name, vocab_size=256) as writer:
        writer.add(np.frombuffer(text, dtype=np.uint8).astype(np.int64))
        writer.commit()
    return name


def curve(folder: Path, tokens: Path, layout: dict[str, Any], **changes: Any) -> list[float]:
    """Return the mean losses of a run's windows of 20 steps."""
    raw = tiny_recipe(
        folder,
        tokens,
        steps=200,
        dtype="float32",
        model={"config": LLAMA},
        layout=layout,
        data={"sequence_length": 128, "global_batch": 16, "micro_batch": 4},
        optimizer={"lr": 2e-3, "warmup": 20, "clip": 1.0},
        checkpoint={"keep": 1},
        **changes,
    )
    steps = run_parallel(run_recipe, parse_recipe(raw).layout.world, raw, timeout=1500)[0]
    losses = [one.loss for one in steps]
    return [fmean(losses[start : start + WINDOW]) for start in range(0, len(losses), WINDOW)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_the_loss_in_float8_stays_beside_that_in_bf16(scaling: str, layout: str, tmp_path: Path) -> None:
    pages = sorted((ROOT / "docs").glob("*.md"))
    tokens = write_text(tmp_path / "tokens", b"".join(page.read_bytes() for page in pages))
    wanted = curve(tmp_path / "bf16", tokens, LAYOUTS[layout], compute="bfloat16")
    found = curve(tmp_path / "fp8", tokens, LAYOUTS[layout], compute="float8", float8_scaling=scaling)
    assert wanted[-1] < 0.6 * wanted[0]  # it learns
    assert found == pytest.approx(wanted, rel=0.02)
