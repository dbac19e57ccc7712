"""Measure starts, in processor time of a whole process: the import, the help, a run's first step, its plans.

Processor time (user and system) is what a start costs; seconds on the clock depend on the disk's cache too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from measure import Row, at_most, in_turn, ratio
from trilith.machine.random_files import llama, write_tokens

SHAPE = llama(64, 2, ids=503, heads=4, groups=2)
KEYS = {key: value for key, value in SHAPE.items() if key != "model_type"}
ROWS, LENGTH = 4, 128

#: One step of the same model, as one writes it with torch and transformers alone.
BARE = f"""
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**{KEYS}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
ids = torch.randint({SHAPE["vocab_size"]}, ({ROWS}, {LENGTH}))
model(ids, labels=ids).loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
"""

CONFIG_KEYS = "\n".join(f"{key} = {json.dumps(value)}" for key, value in SHAPE.items())
RECIPE = f"""
out = "run"
steps = 1
dtype = "float32"
[model.config]
{CONFIG_KEYS}
[optimizer]
lr = 1e-3
warmup = 1
[data]
tokens = "tokens"
sequence_length = {LENGTH}
global_batch = {ROWS}
micro_batch = {ROWS}
"""

LARGE = "llama-3.1-405b-16384gpus"
#: Commands that plan, with the processor time that each may take, in seconds.
PLANS: dict[str, tuple[list[str], float]] = {
    "dry run of 405B on 16,384 GPUs": (["train", LARGE, "--dry-run"], 3.0),
    "whole search for 405B on 16,384 GPUs": (
        ["plan", "llama-3.1-405b", "--gpus", "16384", "--sequence-length", "8192", "--global-batch", "2048"],
        10.0,
    ),
}  # fmt: skip
#: Plan one rank: its processor time and the memory that it adds to a process whose imports are done.
ONE_RANK = """
import json, sys, time
from pathlib import Path
from trilith.recipes import load_recipe
from trilith.planner.dry_run import plan_without_weights, rank_plan

def anonymous():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("RssAnon:")) / 1024

recipe = load_recipe(sys.argv[1], sys.argv[2:])
before, began = anonymous(), time.process_time()
rank_plan(recipe, plan_without_weights(recipe)[0], 5)
print(json.dumps([time.process_time() - began, anonymous() - before]))
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
    ways |= {name: [sys.executable, "-m", "trilith", *words] for name, (words, _) in PLANS.items()}
    taken = in_turn({name: partial(processor_time, words, folder) for name, words in ways.items()}, rounds)
    rows = []
    for name, than, said in (
        ("import trilith", "python", "Python's start"),
        ("trilith --help", "import typer and rich", "typer and rich"),
    ):
        more = [a - b for a, b in zip(taken[name], taken[than], strict=True)]
        rows.append(at_most(f"{name}, beyond {said}", more, 0.3))
    first, bare = taken["trilith train, one step"], taken["torch and transformers, one step"]
    name = "trilith train's first step and checkpoint, as fast as a bare script's step"
    rows.append(ratio(name, first, bare, goal=round(1 / 1.3, 2)))
    rows += [at_most(name, taken[name], most) for name, (_, most) in PLANS.items()]
    return [*rows, *one_rank(rounds)]


def one_rank(rounds: int) -> list[Row]:
    """Measure the plan of one rank of 405B, on an eighth of its GPUs and on all."""
    rows = []
    for data, gpus in ((2, "2,048"), (16, "16,384")):
        overrides = [f"layout.data={data}", f"data.global_batch={128 * data}"]
        command = [sys.executable, "-c", ONE_RANK, LARGE, *overrides]
        ran = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(rounds)]
        seconds, megabytes = zip(*(json.loads(one.stdout) for one in ran), strict=True)
        name = f"plan of one rank of 405B on {gpus} GPUs, beyond imports"
        rows += [at_most(name, seconds, 1.0), at_most(f"{name}: memory", megabytes, 150, "MiB")]
    return rows


def processor_time(command: list[str], folder: Path) -> float:
    """Return the seconds of user and system time that the command and its children take."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    # With bytecode, which installing a package writes, even where the environment says to write none.
    bytecode = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    before = os.times()
    subprocess.run(command, cwd=folder, env=bytecode, check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def write_recipe(folder: Path) -> Path:
    """Write a token file and a recipe of one step of the model; return the recipe's path."""
    write_tokens(folder / "tokens", vocab_size=503)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    return recipe
