"""Define the rows of ``gpu.py``: each is a function that runs in a process of its own and returns figures."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: A folder in memory that goes with the row.
FOLDER = Path(os.environ.get("TRILITH_ROW_FOLDER", "/dev/shm"))

SMALL: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256, "moe_intermediate_size": 128,
}  # fmt: skip
MLA = SMALL | {
    "num_key_value_heads": 4, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "q_lora_rank": 64, "kv_lora_rank": 32, "head_dim": None,
}  # fmt: skip
BF16 = {"compute": "bfloat16"}


# Functions of rows -------------------------------------------------------------------------------------------


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


def command(device: str, words: list[str]) -> dict[str, Any]:
    """Run a trilith command; its output is printed."""
    subprocess.run([sys.executable, "-P", "-m", "trilith", *words], check=True, cwd=FOLDER)
    return {}


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
        "data": {"tokens": str(documents(raw["vocab_size"])), "sequence_length": 256, "global_batch": 4, "micro_batch": 2},
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


def resized(raw: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return a config with other values of the fields that it has."""
    return raw | {key: value for key, value in fields.items() if key in raw}


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


def recipe_of(
    device: str, size: str, blocks: int | None, rows: int, length: int, **keys: Any
) -> dict[str, Any]:
    """Return a recipe of a published size with random tokens; on a CPU one of a tiny model."""
    from trilith.machine.random_files import write_hf_folder, write_tokens
    from trilith.models import published_size

    model: dict[str, Any] = {"size": size}
    if blocks:
        model["config"] = {"num_hidden_layers": blocks}
    ids = 128256
    if device == "cpu":
        from trilith.models import tiny_config

        ids, length, model = 1024, 64, {"config": resized(tiny_config("llama"), SMALL)}
    if "lora" in keys:
        config = model["config"] if device == "cpu" else published_size(size).with_fields({})
        write_hf_folder(FOLDER / "pretrained", config, dtype="BF16")
        model = {"init_from": str(FOLDER / "pretrained")}
    tokens = write_tokens(
        FOLDER / "tokens", count=max(4 * 30 * length, 2_000_000 if device == "cuda" else 0), vocab_size=ids
    )
    data = {"tokens": str(tokens), "sequence_length": length, "global_batch": rows, "micro_batch": rows}
    recipe = {
        "out": str(FOLDER / "run"),
        "steps": 14,
        "device": device,
        "compute": "bfloat16",
        "model": model,
    }
    return recipe | {"data": data} | keys


def steps(device: str, size: str = "llama-3.2-1b", blocks: int | None = None, rows: int = 4, length: int = 4096,
          **keys: Any) -> dict[str, Any]:  # fmt: skip
    """Time whole steps of the trainer, and compare time and memory with the plan's."""
    from trilith.machine.measure.steps import train_steps

    recipe = recipe_of(device, size, blocks, rows, length, **keys)
    figures: dict[str, Any] = train_steps(recipe, 8192 if device == "cuda" else 64)["figures"]
    answer(figures)
    return figures | predicted(recipe, device)


def predicted(recipe: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the planner's milliseconds of a step on an H100, from its table of machines."""
    from trilith.planner.time import machine_named
    from trilith.recipes.recipe import parse_recipe
    from trilith.training.dry_run import plan_without_weights, predicted_step

    checked = parse_recipe(recipe)
    step = predicted_step(checked, plan_without_weights(checked)[0], machine_named("h100-80gb"))
    return {"predicted: ms a step": step.seconds * 1e3}


def profile(device: str, rows: int = 4, length: int = 4096, **keys: Any) -> dict[str, Any]:
    """Profile three compiled steps of Llama 3.2 1B: seconds by kernel, and the places where the host waits."""
    import torch
    from torch.profiler import ProfilerActivity
    from trilith.recipes.recipe import parse_recipe
    from trilith.runs.launch import process_group
    from trilith.training import Trainer, check_run

    checked = parse_recipe(recipe_of(device, "llama-3.2-1b", None, rows, length, **keys) | {"steps": 13})
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    profiler = torch.profiler.profile(activities=[activity], acc_events=True)
    waits: Counter[str] = Counter()
    caught: list[Any] = []
    with process_group(checked.layout, device=checked.device) as state, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *place, **more: caught.append((str(message), place[1:3]))

        def after(metrics: Any) -> None:
            if metrics.step == 5 and device == "cuda":
                caught.clear()
                torch.cuda.set_sync_debug_mode("warn")
            if metrics.step == 7 and device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
                waits.update(
                    f"{Path(file).name}:{line}" for message, (file, line) in caught if "synchroniz" in message
                )
            if metrics.step == 9:
                profiler.start()
            if metrics.step == 12:
                profiler.stop()

        Trainer(checked, state, check_run(checked), quiet=True).run(after)
    spent = Counter[str]()
    for event in profiler.key_averages():
        spent[kernel_kind(event.key)] += (
            event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        )
    named = {
        event.key[:90]: round(event.self_device_time_total / 3e3, 2) for event in profiler.key_averages()
    }
    longest = dict(sorted(named.items(), key=lambda pair: -pair[1])[:40])
    print(json.dumps(longest, indent=1))
    by_kind = {f"{kind}: ms": total / 3e3 for kind, total in spent.most_common()}
    return by_kind | {"host waits in two steps": dict(waits), "kernels": longest}


def kernel_kind(name: str) -> str:
    """Return what a kernel of this name does."""
    kinds = {
        "attention": ("sdpa", "flash", "fmha", "cudnn_generated", "attention"),
        "products": ("gemm", "nvjet", "cutlass", "xmma", "splitK"),
        "AdamW and clipping": ("multi_tensor", "adam", "foreach", "norm_"),
        "compiled": ("triton_",),
        "copies": ("memcpy", "memset", "copy", "cat"),
    }
    for kind, words in kinds.items():
        if any(word.lower() in name.lower() for word in words):
            return kind
    return "others"


def peer(device: str, rows: int = 4, length: int = 4096, compiled: bool = True) -> dict[str, Any]:
    """Time steps of transformers' Llama 3.2 1B: fp32 weights under autocast to bf16, clipped, fused AdamW."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoConfig, AutoModelForCausalLM
    from trilith.models import published_size

    raw = published_size("llama-3.2-1b").with_fields({})
    if device == "cpu":
        raw, length = {**raw, **SMALL, "num_hidden_layers": 2, "intermediate_size": 256}, 64
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw), dtype=torch.float32)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    forward = torch.compile(model) if compiled else model
    ids, seconds = torch.randint(raw["vocab_size"], (rows, length + 1), device=device), []
    for _ in range(14):
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            logits = forward(input_ids=ids[:, :-1]).logits
        cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[4:])
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    return {"ms a step": median * 1e3, "tokens/s": rows * length / median, "peak: GB": peak}


def bench(device: str) -> dict[str, Any]:
    """Run ``trilith bench`` of the device itself and of the layers; keep its figures."""
    quick = ["--device", "cpu", "--quick"] if device == "cpu" else []
    out = FOLDER / "bench"
    command(device, ["bench", "--only", "speed,layers,saving", "--minutes", "2.5", "--out", str(out), *quick])
    report = json.loads((out / "bench.json").read_text())
    return {
        f"{row['part']}, {row['what']}": {"status": row["status"], **row["figures"]} for row in report["rows"]
    }


def answer(figures: dict[str, Any]) -> None:
    Path(sys.argv[3]).write_text(json.dumps(figures))


# Rows: part, name, function, options, seconds at most -----------------------------------------------------------

ROWS: list[tuple[str, str, str, dict[str, Any], float]] = [
    ("smoke", "every module imports", "imports", {}, 90),
    ("smoke", "doctor", "command", {"words": ["doctor"]}, 100),
    ("smoke", "eager, fp32", "tiny", {"compile": False}, 120),
    ("smoke", "compiled, bf16", "tiny", BF16, 150),
    ("smoke", "float16", "tiny", {"compute": "float16", "compile": False}, 120),
    ("smoke", "separate documents, bf16", "tiny", {**BF16, "compile": False, "data": {"documents": "separate"}}, 120),
    ("smoke", "separate documents, compiled", "tiny", {**BF16, "data": {"documents": "separate"}}, 150),
    ("smoke", "float8", "tiny", {"compute": "float8"}, 150),
    ("smoke", "float8 by rows", "tiny", {"compute": "float8", "float8_scaling": "rowwise"}, 150),
    ("smoke", "offload", "tiny", {**BF16, "memory": {"offload": True}}, 150),
    ("smoke", "selective checkpointing", "tiny", {**BF16, "memory": {"checkpointing": "selective"}}, 150),
    ("smoke", "full checkpointing, loss in chunks", "tiny",
     {**BF16, "memory": {"checkpointing": "full", "loss_chunk": 64}}, 150),
    ("smoke", "deterministic", "tiny", {**BF16, "deterministic": True}, 150),
    ("smoke", "LoRA", "tiny", {**BF16, "lora": {"r": 4, "lora_dropout": 0.1}}, 150),
    ("smoke", "FlexAttention", "tiny", {**BF16, "attention_backend": "flex"}, 150),
    ("smoke", "cuDNN's attention", "tiny", {**BF16, "attention_backend": "cudnn"}, 150),
    ("smoke", "Qwen3 MoE", "tiny", {**BF16, "family": "qwen3_moe", "compile": False}, 120),
    ("smoke", "Qwen3 MoE, compiled", "tiny", {**BF16, "family": "qwen3_moe"}, 150),
    ("smoke", "gpt-oss, compiled", "tiny", {**BF16, "family": "gpt_oss"}, 150),
    ("smoke", "DeepSeek-V3, compiled", "tiny", {**BF16, "family": "deepseek_v3", "config": MLA}, 150),
    ("smoke", "Gemma 2, compiled", "tiny", {**BF16, "family": "gemma2"}, 150),
    ("smoke", "Qwen3-Next, compiled", "tiny", {**BF16, "family": "qwen3_next"}, 150),
    ("tests", "families in fp64 against the CPU", "families", {"dtype": "float64"}, 150),
    ("tests", "families in bf16 against the CPU", "families", {"dtype": "bfloat16"}, 150),
    ("tests", "experts' kernels", "tests", {"words": ["tests/layers/test_moe.py", "-n", "0"]}, 150),
    ("tests", "layouts that share the GPU", "tests",
     {"words": ["tests/layouts/test_step.py", "tests/layouts/test_packing.py", "-n", "3", "--dist", "loadfile"]}, 200),
    ("speed", "Llama 3.2 1B, compiled", "steps", {"compile": True}, 120),
    ("speed", "transformers, compiled", "peer", {}, 120),
    ("speed", "Llama 3.2 1B, compiled, profiled", "profile", {"compile": True}, 120),
    ("speed", "Llama 3.2 1B, loss_chunk 4096", "steps", {"compile": True, "memory": {"loss_chunk": 4096}}, 120),
    ("speed", "Llama 3.2 1B, eager", "steps", {"compile": False}, 90),
    ("speed", "bench", "bench", {}, 160),
    ("speed", "Llama 3.1 8B, 8 blocks, one row of 8,192", "steps",
     {"size": "llama-3.1-8b", "blocks": 8, "rows": 1, "length": 8192, "compile": True}, 120),
    ("speed", "Llama 3.1 8B, LoRA, one row of 8,192", "steps",
     {"size": "llama-3.1-8b", "rows": 1, "length": 8192, "compile": True, "lora": {"r": 16, "lora_alpha": 32}}, 150),
    ("speed", "Llama 3.2 1B, one row of 32,768, full checkpointing", "steps",
     {"rows": 1, "length": 32768, "compile": True, "memory": {"checkpointing": "full"}}, 120),
    ("speed", "Llama 3.2 1B, float8", "steps", {"compile": True, "compute": "float8"}, 150),
]  # fmt: skip


def main() -> None:
    work, options = sys.argv[1], json.loads(sys.argv[2])
    answer(globals()[work](**options))


if __name__ == "__main__":
    main()
