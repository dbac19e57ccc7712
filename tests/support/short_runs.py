"""Whole training runs in miniature, for tests: a recipe over random tokens, run on the ranks of a test."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from torch import Tensor
from trilith.checkpoints import read_source
from trilith.machine.random_files import write_tokens
from trilith.models import CausalLM, family_of
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.ranks.pool import run_parallel
from trilith.recipes.recipe import parse_recipe
from trilith.recipes.recipe_text import to_toml
from trilith.runs.metrics import StepMetrics, read_metrics
from trilith.training.precision import Precision
from trilith.training.trainer import Trainer
from trilith.training.zero_on_fsdp import shard_over_data

from support.configs import TINIEST_LLAMA, TINY_LLAMA


def tiny_recipe(out: Path, tokens: Path, **changes: Any) -> dict[str, Any]:
    """Return a recipe as data: 6 steps in fp64 of a tiny Llama; ``changes`` replace some of its keys."""
    recipe: dict[str, Any] = {
        "out": str(out),
        "steps": 6,
        "seed": 3,
        "device": "cpu",
        "dtype": "float64",
        "model": {"config": TINY_LLAMA},
        "layout": {},
        "data": {"tokens": str(tokens), "sequence_length": 16, "global_batch": 4, "micro_batch": 2},
        "optimizer": {"lr": 1e-2, "warmup": 2, "clip": 0.5},
        "checkpoint": {"keep": 10},
    }
    for key, value in changes.items():
        recipe[key] = recipe[key] | value if isinstance(value, dict) and key in recipe else value
    return recipe


def write_recipe(file: Path, raw: dict[str, Any]) -> Path:
    """Write a recipe's data as the file that a user would write; return the file."""
    file.write_text("".join(f"{key} = {to_toml(value)}\n" for key, value in raw.items()))
    return file


def write_short_recipe(file: Path, out: Path) -> Path:
    """Write tokens and a recipe of two steps with few keys, as a user begins; return the recipe's file."""
    data = {"tokens": str(write_tokens(file.parent / "tokens")), "sequence_length": 16, "global_batch": 4}
    return write_recipe(file, {"out": str(out), "steps": 2, "model": {"config": TINY_LLAMA}, "data": data})


def trainer_of(raw: dict[str, Any]) -> Trainer:
    """Return this rank's trainer of the recipe, which prints nothing."""
    recipe = parse_recipe(raw)
    return Trainer(recipe, ParallelState.start(recipe.layout), quiet=True)


def run_and_listen(raw: dict[str, Any]) -> tuple[list[StepMetrics], str]:
    """Run it as ``run_recipe`` does; the metrics of the steps, and the lines that this rank prints."""
    recipe, lines, steps = parse_recipe(raw), StringIO(), list[StepMetrics]()
    with redirect_stdout(lines):
        Trainer(recipe, ParallelState.start(recipe.layout)).run(steps.append)
    return steps, lines.getvalue()


def run_recipe(raw: dict[str, Any]) -> list[StepMetrics]:
    """Run it on the ranks that call this together, in their process group; the metrics of the steps."""
    steps: list[StepMetrics] = []
    trainer_of(raw).run(steps.append)
    return steps


def train(raw: dict[str, Any]) -> list[StepMetrics]:
    """Run it on ranks of the pool, as many as its layout has; rank 0's metrics of the steps."""
    metrics: list[StepMetrics] = run_parallel(run_recipe, parse_recipe(raw).layout.world, raw)[0]
    return metrics


def losses(out: Path) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of every step that the run's folder has noted."""
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(out / "metrics.jsonl")]


def whole_tensors(out: Path) -> dict[str, Tensor]:
    """Return every tensor of the newest checkpoint, whole: weights and both moments."""
    return {name: tensor.read() for name, tensor in read_source(out).ours.items()}


def built(layout: Layout | None, precision: Precision, config: dict[str, Any] = TINIEST_LLAMA) -> CausalLM:
    """Return this rank's part of a model with its initial weights, sharded over the data axes.

    Without a layout, no process group is needed.
    """
    state = ParallelState.alone() if layout is None else ParallelState.start(layout)
    family = family_of(config)
    model = family.build(family.from_hf(config), state=state, dtype=precision.master)
    shard_over_data(model, state, precision)
    model.to_empty(device="cpu")
    initialize(model, 3, state=state)
    return model
