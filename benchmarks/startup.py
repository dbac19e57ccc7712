"""Measure starts, in processor time of a whole process: the import, the help, the first step of a run.

Processor time (user and system) is what a start costs; seconds on the clock depend on the disk's cache too.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from measure import Row, in_turn, ratio

SHAPE = {
    "vocab_size": 503,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ROWS, LENGTH = 4, 128

#: One step of the same model, as one writes it with torch and transformers alone.
BARE = f"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**{SHAPE}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
ids = torch.randint({SHAPE["vocab_size"]}, ({ROWS}, {LENGTH}))
model(ids, labels=ids).loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
"""

RECIPE = """
out = "run"
steps = 1
dtype = "float32"
[model.config]
{config}
[optimizer]
lr = 1e-3
warmup = 1
[data]
tokens = "tokens"
sequence_length = {length}
global_batch = {rows}
micro_batch = {rows}
"""


def main(folder: Path, rounds: int) -> list[Row]:
    recipe = write_recipe(folder)
    python = [sys.executable, "-c"]
    ways: dict[str, list[str]] = {
        "python": [*python, "pass"],
        "import trilith": [*python, "import trilith"],
        "import typer and rich": [*python, "import typer, rich"],
        "trilith --help": [sys.executable, "-m", "trilith", "--help"],
        "torch and transformers, one step": [*python, BARE],
        "trilith train, one step": [sys.executable, "-m", "trilith", "train", str(recipe)],
    }
    runs: dict[str, Callable[[], float]] = {
        name: partial(processor_time, command, folder) for name, command in ways.items()
    }
    taken = in_turn(runs, rounds)
    begun, helped = taken["import trilith"], taken["trilith --help"]
    rows = [
        beyond("import trilith, beyond Python's start", begun, taken["python"]),
        beyond("trilith --help, beyond typer and rich", helped, taken["import typer and rich"]),
    ]
    first, bare = taken["trilith train, one step"], taken["torch and transformers, one step"]
    name = "trilith train's first step and checkpoint, as fast as a bare script's step"
    return [*rows, ratio(name, first, bare, goal=round(1 / 1.3, 2))]


def beyond(name: str, ours: list[float], theirs: list[float]) -> Row:
    """Return how many seconds more ours takes; the goal is 0.3 s."""
    found = sorted(a - b for a, b in zip(ours, theirs, strict=True))
    median = statistics.median(found)
    return Row(name, median, found[0], found[-1], unit="s", goal="<= 0.3", good=median <= 0.3)


def processor_time(command: list[str], folder: Path) -> float:
    """Return the seconds of user and system time that the command and its children take."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    before = os.times()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def write_recipe(folder: Path) -> Path:
    """Write a token file and a recipe of one step of the model; return the recipe's path."""
    from trilith.testing.short_runs import write_tokens

    write_tokens(folder / "tokens", vocab_size=503)
    shape = {"model_type": "llama", **SHAPE}
    recipe = folder / "recipe.toml"
    recipe.write_text(
        RECIPE.format(
            config="\n".join(f"{key} = {json.dumps(value)}" for key, value in shape.items()),
            length=LENGTH,
            rows=ROWS,
        )
    )
    return recipe
