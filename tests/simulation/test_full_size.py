"""The plan of large models is the peak of their whole step, with all blocks and micro-batches."""

import pytest
from trilith.planner.dry_run import dry_run
from trilith.recipes.recipe import parse_recipe

#: Model, layout, global batch, micro-batch, length of a row, checkpointing; the plan over the peak, less 1.
STEPS = {
    "70B, ZeRO 3": ("llama-3.1-70b", {"data": 64, "zero": 3}, 256, 2, 8192, "full", 0),
    "70B, pipeline": (
        "llama-3.1-70b",
        {"tensor": 8, "sequence": True, "pipeline": 8, "data": 2, "zero": 1},
        32, 1, 8192, "selective", 0,
    ),
    "405B, interleaved": (
        "llama-3.1-405b",
        {"tensor": 8, "sequence": True, "pipeline": 8, "virtual_stages": 8, "schedule": "interleaved",
         "data": 256, "data_replicate": 2, "zero": 1},
        2048, 1, 8192, "selective", -0.0001,
    ),
    "405B, ring": (
        "llama-3.1-405b",
        {"tensor": 8, "sequence": True, "context": 2, "ring": True, "pipeline": 16, "data": 64, "zero": 1},
        1024, 1, 8192, "full", -0.0001,
    ),
    "DeepSeek-V3, experts": (
        "deepseek-v3",
        {"pipeline": 16, "expert": 8, "data": 16, "zero": 1},
        256, 1, 4096, "full", 0,
    ),
    "DeepSeek-V3, ZeRO 3": (
        "deepseek-v3",
        {"tensor": 4, "sequence": True, "expert": 32, "data": 128, "zero": 3},
        128, 1, 4096, "full", -0.0002,
    ),
    "Qwen3-Next, experts": (
        "qwen3-next-80b-a3b",
        {"expert": 8, "data": 32, "zero": 3},
        64, 1, 4096, "full", 0,
    ),
    "Qwen3-Next, zero bubble": (
        "qwen3-next-80b-a3b",
        {"pipeline": 8, "schedule": "zbv", "expert": 4, "data": 8, "zero": 1},
        128, 1, 4096, "none", 0.0003,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_the_plan_is_the_peak_of_the_whole_step(worker, name):
    size, layout, rows, micro_batch, length, checkpointing, error = STEPS[name]
    recipe = parse_recipe(
        {
            "out": "run",
            "steps": 1,
            "device": "cuda",
            "compute": "bfloat16",
            "layout": layout,
            "data": {
                "tokens": "tokens",
                "sequence_length": length,
                "global_batch": rows,
                "micro_batch": micro_batch,
            },
            "optimizer": {"lr": 1e-4},
            "memory": {"checkpointing": checkpointing},
            "model": {"size": size},
        }
    )
    heaviest = dry_run(recipe).rank
    record = worker.simulate(recipe, heaviest.rank)
    assert heaviest.memory.total / record.peak - 1 == pytest.approx(error, abs=5e-4)
