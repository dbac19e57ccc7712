"""Measure steps on one GPU: trilith's, profiled ones, transformers', and ``trilith bench``."""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from gpu_common import FOLDER, SMALL, answer, command, resized


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


def steps(
    device: str,
    size: str = "llama-3.2-1b",
    blocks: int | None = None,
    rows: int = 4,
    length: int = 4096,
    **keys: Any,
) -> dict[str, Any]:
    """Time whole steps of the trainer, and compare time and memory with the plan's."""
    from trilith.machine.measure.steps import train_steps

    recipe = recipe_of(device, size, blocks, rows, length, **keys)
    figures: dict[str, Any] = train_steps(recipe, 8192 if device == "cuda" else 64)["figures"]
    answer(figures)
    return figures | predicted(recipe, device)


def predicted(recipe: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the planner's milliseconds of a step on an H100, from its table of machines."""
    from trilith.planner.dry_run import plan_without_weights, predicted_step
    from trilith.planner.time import machine_named
    from trilith.recipes.recipe import parse_recipe

    checked = parse_recipe(recipe)
    step = predicted_step(checked, plan_without_weights(checked)[0], machine_named("h100-80gb"))
    return {"predicted: ms a step": step.seconds * 1e3}


def profile(device: str, rows: int = 4, length: int = 4096, **keys: Any) -> dict[str, Any]:
    """Profile three steps of Llama 3.2 1B: milliseconds by kernel, and the places where the host waits."""
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
    spent, named = Counter[str](), Counter[str]()
    for event in profiler.key_averages():
        total = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        spent[kernel_kind(event.key)] += total
        named[event.key[:200]] += total / 3e3
    longest = {name: round(total, 2) for name, total in named.most_common(40)}
    print(json.dumps(longest, indent=1))
    by_kind: dict[str, Any] = {f"{kind}: ms": total / 3e3 for kind, total in spent.most_common()}
    return by_kind | {"host waits in two steps": dict(waits), "kernels": longest}


def kernel_kind(name: str) -> str:
    """Return what a kernel of this name does."""
    kinds = {
        "compiled": ("triton_",),
        "attention": ("sdpa", "flash", "fmha", "cudnn", "attention"),
        "products": ("gemm", "nvjet", "cutlass", "xmma", "splitK"),
        "AdamW and clipping": ("multi_tensor", "adam", "foreach", "norm_"),
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
