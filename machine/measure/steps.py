"""Time real training steps of a recipe, in the trainer's own loop, and what a save and a conversion take."""

import filecmp
import os
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ...checkpoints import convert
from ...parallel_state import ParallelState, dtype_named
from ...planner.dry_run import heaviest
from ...recipes.recipe import Recipe, parse_recipe
from ...runs.launch import process_group
from ...runs.metrics import StepMetrics
from ...simulation.model_flops import Mfu, flops_of_token, peak_flops
from ...testing import LiveBytes
from ...training import Trainer, check_run
from ...training.run_plan import RunPlan
from ..random_files import write_hf_folder
from .speed import matmul_flops
from .timing import Figures

#: Steps whose time does not count: compilation, the allocator's first requests.
WARM_UP = 4


class _Enough(Exception):
    """End a run after its last step; otherwise the trainer would save a checkpoint."""


def _train(recipe: Recipe, state: ParallelState, plan: RunPlan) -> tuple[list[float], list[float]]:
    """Train all steps, and save nothing unless the recipe says when; return their losses, and the seconds
    from one's end, when the host has read its loss, to the next's. The first step's are from the start.
    """
    losses, ends = list[float](), [time.perf_counter()]

    def after(metrics: StepMetrics) -> None:
        ends.append(time.perf_counter())
        losses.append(metrics.loss)
        if len(losses) == recipe.steps and not recipe.checkpoint.every:
            raise _Enough

    with suppress(_Enough):
        Trainer(recipe, state, plan, quiet=True).run(after)
    return losses, [end - begin for begin, end in pairwise(ends)]


def train_steps(recipe: dict[str, Any], side: int) -> dict[str, Any]:
    """Train all steps of ``recipe`` and report the median of those after the first ``WARM_UP``. Collective.

    ``side``: of the matrices whose product is timed before, in the same process.
    """
    checked = parse_recipe(recipe)
    compute = dtype_named(checked.compute_dtype)
    with process_group(checked.layout, device=checked.device) as state:
        matmul = matmul_flops(state.device, side, compute)
        plan = check_run(checked)
        flops = flops_of_token(plan.family, plan.config, checked.data.sequence_length)
        if state.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses, (first, *later) = _train(checked, state, plan)
        seconds = later[WARM_UP - 1 :]
        median = statistics.median(seconds)
        rate = checked.data.global_batch * checked.data.sequence_length / median
        figures: Figures = {
            "tokens/s": rate,
            "ms a step": median * 1e3,
            "slowest counted step: ms": max(seconds) * 1e3,
            "first step after: s": first,
            "matmul here: TFLOP/s": matmul / 1e12,
            "of the matmul, causal": rate * flops.causal / matmul / checked.layout.world,
            "loss, first": losses[0],
            "loss, last": losses[-1],
        }
        peak = peak_flops(state.device, compute)
        if (used := Mfu(flops, checked.layout.world, peak)(rate)) is not None:
            figures |= {"MFU, causal": used.causal, "MFU, full": used.full}
        if state.device.type == "cuda":
            planned = heaviest(checked, plan).memory.total
            figures |= _memory(torch.cuda.max_memory_allocated(), planned)
            figures["reserved: GB"] = torch.cuda.max_memory_reserved() / 1e9
    return {"figures": figures}


def peak_memory(recipe: dict[str, Any]) -> dict[str, Any]:
    """Train the steps of ``recipe``; compare the most bytes that tensors held with the planner's figure.

    Collective; the figure is rank 0's. On a CPU the bytes are counted operator by operator.
    """
    checked = parse_recipe(recipe)
    plan = check_run(checked)
    with process_group(checked.layout, device=checked.device) as state:
        on_cpu = state.device.type == "cpu"
        live = LiveBytes() if on_cpu else None
        if not on_cpu:
            torch.cuda.reset_peak_memory_stats()
        with live or nullcontext():
            _train(checked, state, plan)
        peak = live.peak if live is not None else torch.cuda.max_memory_allocated()
    return {"figures": _memory(peak, heaviest(checked, plan).memory.total)}


def _memory(peak: int, planned: int) -> Figures:
    return {"peak: GB": peak / 1e9, "planned: GB": planned / 1e9, "peak of the plan": peak / planned}


def step_stalls(recipe: dict[str, Any]) -> dict[str, Any]:
    """Train ``recipe``, which saves on the way; report how much longer a save makes a step. Collective.

    The last step's save is not counted, because no step waits for it.
    """
    checked = parse_recipe(recipe)
    with process_group(checked.layout, device=checked.device) as state:
        _, (_, *seconds) = _train(checked, state, check_run(checked))
    median, longest = statistics.median(seconds), max(seconds)
    newest = max(Path(checked.out, "checkpoints").glob("step-*"))
    size = sum(os.stat(path).st_size for path in newest.rglob("*") if path.is_file())
    return {
        "figures": {
            "stall: s": longest - median,
            "median step: s": median,
            "checkpoint: GB": size / 1e9,
            "checkpoint by stall: GB/s": size / 1e9 / max(longest - median, 1e-9),
        },
        "note": f"longest step minus median step, of {len(seconds)}",
    }


def conversion_speed(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Write a folder of random bf16 weights; convert it to tensor 4 x pipeline 2 and back, and copy it.

    All of it lies in ``folder``, which must exist. The files are in the page cache when they are read.
    """
    source, copied = Path(folder, "hf"), Path(folder, "copied")
    cut, back = Path(folder, "cut"), Path(folder, "back")
    size = write_hf_folder(source, config, dtype="BF16")
    figures: Figures = {"weights: GB": size / 1e9}
    tensor = 4 if config["num_key_value_heads"] % 4 == 0 else 2
    work: dict[str, Callable[[], object]] = {
        "copy": lambda: shutil.copytree(source, copied),
        "to sharded": lambda: convert(source, cut, tensor=tensor, pipeline=2),
        "to Hugging Face": lambda: convert(cut, back),
    }
    for name, run in work.items():
        began = time.perf_counter()
        run()
        figures[f"{name}: GB/s"] = size / 1e9 / (time.perf_counter() - began)
    names = [path.name for path in source.glob("*.safetensors")]
    _, other, missing = filecmp.cmpfiles(source, back, names, shallow=False)
    note = f"tensor {tensor} x pipeline 2, checksums and fsync included; the copy has neither"
    if other or missing:
        return {"figures": figures, "status": "differs", "note": f"other bytes after the way back; {note}"}
    return {"figures": figures, "status": "passed", "note": f"same bytes after the way back; {note}"}
