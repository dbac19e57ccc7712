"""Train a small Llama as one contender of ``training.py``: a rank that takes one step for each line it reads.

Every contender has the same weights, rows, loss, clipping and AdamW, and prints its loss.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from trilith.machine.measure.cases import SMALL

LENGTH, MICRO, RATE, DECAY, BETAS = 512, 2, 1e-3, 0.1, (0.9, 0.95)
CONFIG = SMALL | {"tie_word_embeddings": False}
USUAL: dict[str, Any] = {"config": CONFIG}
Step = Callable[[Tensor], float]


def theirs(folder: str, dtype: torch.dtype, how: str, compiled: bool) -> Step:
    """Return a step of transformers' model: alone, under DDP or FSDP2, or cut by DTensor's plan."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.config.use_cache = False
    world, rank = dist.get_world_size(), dist.get_rank()
    pieces = world if how in ("ddp", "fsdp") else 1
    if how == "ddp":
        model = DistributedDataParallel(model)
    if how == "fsdp":
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    if how == "dtensor":
        mesh = init_device_mesh("cpu", (world,))
        columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        inside = {f"self_attn.{name}": ColwiseParallel() for name in columns[:3]}
        inside |= {f"mlp.{name}": ColwiseParallel() for name in columns[3:]}
        for block in model.model.layers:
            plan = {**inside, "self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
            parallelize_module(block, mesh, plan)
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    optimizer = adamw(model)
    forward: Any = torch.compile(model) if compiled else model

    def step(rows: Tensor) -> float:
        mine, total = rows.chunk(pieces)[rank if pieces > 1 else 0], 0.0
        parts = mine.split(MICRO)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            if how == "fsdp":
                model.set_requires_gradient_sync(last)
            with model.no_sync() if how == "ddp" and not last else nullcontext():
                logits = forward(input_ids=part[:, :-1]).logits
                loss = mean_loss(logits, part[:, 1:])
                (loss / len(parts)).backward()
            total += float(loss.detach()) / len(parts)
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        if pieces > 1:
            mean = torch.tensor(total)
            dist.all_reduce(mean)
            total = float(mean) / pieces
        return total

    return step


def clip(model: nn.Module) -> None:
    """Clip the gradient norm to 1; torch's function takes no mixture of plain tensors and DTensors."""
    trained = [one for one in model.parameters() if one.grad is not None]
    kinds = [[one for one in trained if isinstance(one, DTensor) is cut] for cut in (False, True)]
    grads = [[one.grad for one in kind if one.grad is not None] for kind in kinds if kind]
    norms = [nn.utils.get_total_norm(some) for some in grads]
    norm = torch.stack([one.full_tensor() if isinstance(one, DTensor) else one for one in norms]).norm()
    for kind in filter(None, kinds):
        nn.utils.clip_grads_with_norm_(kind, 1.0, norm)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for one in model.parameters():
        groups.setdefault((one.ndim > 1, isinstance(one, DTensor)), []).append(one)
    parts = [
        {"params": some, "weight_decay": DECAY if matrix else 0.0} for (matrix, _), some in groups.items()
    ]
    return torch.optim.AdamW(parts, lr=RATE, betas=BETAS, fused=True)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def planned(
    dtype: torch.dtype,
    layout: dict[str, Any],
    rows: int,
    compiled: bool = False,
    model: dict[str, Any] = USUAL,
) -> tuple[Any, Any]:
    """Return the recipe that this library's contenders train, and its plan; ``model``: its table."""
    from trilith.recipes.recipe import parse_recipe
    from trilith.training.run_plan import plan

    recipe = parse_recipe(
        {
            "out": "-",
            "steps": 100,
            "compile": compiled,
            "dtype": str(dtype).removeprefix("torch."),
            "layout": layout,
            "model": model,
            "data": {"tokens": "-", "sequence_length": LENGTH, "global_batch": rows, "micro_batch": MICRO},
            "optimizer": {"lr": RATE, "weight_decay": DECAY, "betas": [*BETAS], "clip": 1.0},
        }
    )
    return recipe, plan(recipe)


def ours(
    folder: str,
    dtype: torch.dtype,
    layout: dict[str, Any],
    rows: int,
    compiled: bool,
    model: dict[str, Any] = USUAL,
) -> Step:
    """Return a step of this library, from a recipe as ``trilith train`` has it."""
    from trilith.checkpoints import begin_moments, load
    from trilith.data.batch import Batch
    from trilith.parallel_state import ParallelState
    from trilith.training.build import build

    recipe, made = planned(dtype, layout, rows, compiled, model)
    state = ParallelState.start(recipe.layout)
    trained, update, _ = build(recipe, made, state)
    load(folder, trained.model)
    begin_moments(trained.model, update.optimizer)

    def step(tokens: Tensor) -> float:
        mine = tokens.chunk(recipe.layout.data)[state.data_index]
        result = trained.launch(Batch(mine[:, :-1].contiguous(), mine[:, 1:].contiguous()))
        return update(result).loss

    return step


def main() -> None:
    wanted: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted["dtype"]]
    common, model = (wanted["folder"], dtype), wanted.get("model", USUAL)
    if wanted["side"] == "ours":
        step = ours(*common, wanted["layout"], wanted["rows"], wanted["compiled"], model)
    elif wanted["side"] == "pipelining":
        from stage_trainer import staged

        step = staged(*common, wanted["layout"], wanted["rows"])
    elif wanted["side"] == "megatron":
        from megatron_trainer import megatron

        step = megatron(*common)
    else:
        step = theirs(*common, wanted["side"], wanted["compiled"])
    generator = torch.Generator().manual_seed(1)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        ids = model["config"]["vocab_size"]
        rows = torch.randint(ids, (wanted["rows"], LENGTH + 1), generator=generator)
        began = time.process_time()
        loss, processor = step(rows), time.process_time() - began
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        sys.stdout.write(json.dumps({"loss": loss, "memory": most, "processor": processor}) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def save_model(folder: Path, config: dict[str, Any] = CONFIG) -> None:
    """Save transformers' model with random weights, which every contender starts from."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
