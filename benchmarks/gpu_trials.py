"""Try trilith on one GPU: short programs that work or do not, and comparisons with the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_common import FOLDER, SMALL, answer, command, resized

ROOT = Path(__file__).resolve().parent.parent


def imports(device: str) -> dict[str, Any]:
    """Import every module of the installed package."""
    import importlib
    import pkgutil

    import trilith

    names = [module.name for module in pkgutil.walk_packages(trilith.__path__, "trilith.")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    return {"modules": len(names)}


def tests(device: str, words: list[str]) -> dict[str, Any]:
    """Run tests of the checkout on the device."""
    environment = os.environ | {"TRILITH_TEST_DEVICE": device, "OMP_NUM_THREADS": "1"}
    program = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--maxfail=20",
        "-p",
        "no:cacheprovider",
        "-rf",
        *words,
    ]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-5000:], done.stderr[-500:])
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode:
        raise SystemExit(done.returncode)
    return {"outcome": last[0].strip("= ")}


def tiny(
    device: str, family: str = "llama", config: dict[str, Any] | None = None, **keys: Any
) -> dict[str, Any]:
    """Train a small model of a family for four steps with ``trilith train``, stop, and go on for two."""
    from trilith.machine.random_files import write_hf_folder
    from trilith.models import tiny_config

    recipe = FOLDER / "recipe.toml"
    raw = resized(tiny_config(family), SMALL if config is None else config)
    merged: dict[str, Any] = {
        "out": str(FOLDER / "run"), "steps": 6, "device": device, "model": {"config": raw}, "log_every": 1,
        "data": {
            "tokens": str(documents(raw["vocab_size"])), "sequence_length": 256,
            "global_batch": 4, "micro_batch": 2,
        },
    }  # fmt: skip
    if "lora" in keys:
        write_hf_folder(FOLDER / "pretrained", raw)
        merged["model"] = {"init_from": str(FOLDER / "pretrained")}
    for key, value in keys.items():
        merged[key] = {**merged[key], **value} if isinstance(merged.get(key), dict) else value
    recipe.write_text("".join(f"{key} = {toml(value)}\n" for key, value in merged.items()))
    command(device, ["train", str(recipe), "stop_after=4"])
    command(device, ["train", str(recipe)])
    lines = [json.loads(line) for line in (FOLDER / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    if len(losses) != 6 or not all(0 < loss < 100 for loss in losses):
        raise SystemExit(f"losses: {losses}")
    return {"first loss": losses[0], "last loss": losses[-1]}


def toml(value: Any) -> str:
    """Return a value as TOML writes it: a table in one line, without its keys that are null."""
    if not isinstance(value, dict):
        return json.dumps(value)
    return (
        "{" + ", ".join(f"{key} = {toml(entry)}" for key, entry in value.items() if entry is not None) + "}"
    )


def documents(ids: int) -> Path:
    """Write a token file of random documents, most of them shorter than a row."""
    import numpy as np
    from trilith.data.token_writer import TokenWriter

    draw, name = np.random.default_rng(0), FOLDER / "tokens"
    with TokenWriter(name, vocab_size=ids) as writer:
        for length in draw.integers(3, 300, 400):
            writer.add(draw.integers(0, ids, length))
        writer.commit()
    return name


def families(device: str, dtype: str) -> dict[str, Any]:
    """Compare each family's tiny model with fp64 on the CPU: loss and gradients, from the same weights."""
    from trilith.models import FAMILIES
    from trilith.parallel_state import Layout
    from trilith.runs.launch import process_group

    gaps, failures, bound = {}, {}, 1e-9 if dtype == "float64" else 0.1
    with process_group(Layout(), device=device) as state:
        for name in FAMILIES:
            try:
                gaps[name] = compared(name, state, dtype)
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"[:300]
    over = {name: gap for name, gap in gaps.items() if not gap <= bound}
    name, gap = max(gaps.items(), key=lambda pair: pair[1], default=("", 0.0))
    figures = {"families": len(gaps), "largest difference": gap, "of": name, "over": over, "failed": failures}
    answer(figures)
    if failures or over:
        raise SystemExit(f"{json.dumps(figures, indent=1)}")
    return figures


def compared(name: str, state: Any, dtype: str) -> float:
    """Return the largest relative difference of the loss and of any gradient; in bf16, where small gradients
    are mostly rounding, that of the norm of all gradients.
    """
    import torch
    from trilith.data.batch import Batch
    from trilith.models import family_of, tiny_config
    from trilith.parallel_state import ParallelState, initialize
    from trilith.testing.layouts import assemble, differences, observe, random_rows, roughen
    from trilith.training import Step, TokenLoss

    family = family_of(raw := tiny_config(name))
    config = family.from_hf(raw)
    rows = random_rows(4, 24, config.vocab_size, torch.Generator().manual_seed(1))

    def seen(state: ParallelState, dtype: torch.dtype) -> Any:
        def build() -> Any:
            model = family.build(config, state=state, dtype=dtype)
            model.to_empty(device=state.device)
            initialize(model, 3, state=state)
            roughen(model, 3, state)
            return model, Step(model, TokenLoss(model), micro_batch=2)

        return observe(build, [Batch(*rows).to(state.device)], state)

    exact, there = seen(ParallelState.alone(), torch.float64), seen(state, getattr(torch, dtype))
    expected = assemble([exact.gradients])
    gap = abs(there.losses[0] / exact.losses[0] - 1)
    if dtype == "float64":
        return max(gap, *(apart for _, apart in differences(expected, [there.gradients])))
    squares = [(there.gradients[key][2].double() - expected[key]).square().sum() for key in expected]
    return max(gap, float((sum(squares) / sum(tensor.square().sum() for tensor in expected.values())) ** 0.5))
