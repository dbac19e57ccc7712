"""Check rules about several keys of a recipe together."""

from __future__ import annotations

import math

from ..layers import routers
from ..models import Family, ModelConfig, published_size
from ..parallel_state import BadInput, Layout, nearest_multiples
from ..pipeline import check_recomputation, schedule_kind
from .optimizer_sections import LossScaleSection, OptimizerSection
from .sections import (
    CheckpointSection,
    DataSection,
    DebugSection,
    ExpertsSection,
    MemorySection,
    ModelSection,
    WatchSection,
)


def check_model(section: ModelSection, where: str) -> None:
    """Refuse a recipe that does not say which model it trains, and one that says it twice."""
    if section.size is None:
        if section.init_from is None and section.config is None:
            raise BadInput(where, "model", expected="init_from, config or size", found=section.model_dump())
        return
    published_size(section.size, f"{where}: model.size")
    if section.init_from is not None:
        todo = "Leave size out: the weights have a config of their own"
        raise BadInput(where, "model.size", expected="no init_from beside it", found=section.size, todo=todo)
    if isinstance(section.config, str):
        todo = "Fields in [model.config] replace those of the size"
        expected = "no path in model.config beside it"
        raise BadInput(where, "model.size", expected=expected, found=section.size, todo=todo)


def check_checkpoint(section: CheckpointSection, where: str) -> None:
    """Refuse a recipe that restores from a mirror and names none."""
    if section.restore and section.mirror is None:
        raise BadInput(
            where, "checkpoint.restore", expected="checkpoint.mirror, the place to restore from", found="none"
        )


def check_optimizer(section: OptimizerSection, steps: int, where: str) -> None:
    """Refuse a schedule that does not fit the run, and half a statement of how lr scales."""
    if section.decay is not None and section.schedule != "wsd":
        raise BadInput(
            where,
            "optimizer.decay",
            expected='schedule = "wsd", the only one with a last phase',
            found=f'schedule = "{section.schedule}"',
        )
    if section.schedule == "wsd" and section.warmup + decay_steps(section, steps) > steps:
        raise BadInput(
            where,
            "optimizer.decay",
            expected=f"at most the {max(0, steps - section.warmup)} steps after the warm-up",
            found=decay_steps(section, steps),
        )
    if (section.scale_lr is None) != (section.reference_batch is None):
        raise BadInput(
            where,
            "optimizer.scale_lr",
            expected="scale_lr and reference_batch together, or neither",
            found=f"scale_lr = {section.scale_lr}, reference_batch = {section.reference_batch}",
        )


def decay_steps(section: OptimizerSection, steps: int) -> int:
    """Return the length of wsd's last phase: a tenth of the run, unless the recipe says it."""
    return max(1, steps // 10) if section.decay is None else section.decay


def check_experts(section: ExpertsSection, family: Family, config: ModelConfig, *, adapters: bool) -> None:
    """Refuse what is said of experts, or of their routers' biases, for a model that has none."""
    found = [router for _, router in routers(family.on_meta(config))]
    if not found:
        raise BadInput("recipe", "experts", expected="a model with experts", found=family.model_type)
    if not section.bias_rate:
        return
    if not any(router.bias is not None for router in found):
        raise BadInput(
            "recipe",
            "experts.bias_rate",
            expected=f"0: the routers of {family.model_type} have no biases",
            found=section.bias_rate,
            todo="experts.balance keeps such experts evenly used",
        )
    if adapters:
        raise BadInput(
            "recipe",
            "experts.bias_rate",
            expected="0 with [lora]: the biases belong to the base, which is frozen",
            found=section.bias_rate,
        )


def check_precision(dtype: str, compute: str | None, scale: LossScaleSection, where: str) -> None:
    """Refuse masters that are too narrow for float16, and loss scales that would change bits."""
    if compute == "float16" and dtype == "bfloat16":
        raise BadInput(where, "dtype", expected="float32 with compute = float16", found=dtype)
    for key in ("initial", "minimum", "maximum"):
        value = getattr(scale, key)
        if math.frexp(value)[0] != 0.5:
            raise BadInput(where, f"loss_scale.{key}", expected="a power of two", found=value)
    if not scale.minimum <= scale.initial <= scale.maximum:
        raise BadInput(
            where,
            "loss_scale.initial",
            expected=f"between minimum={scale.minimum:g} and maximum={scale.maximum:g}",
            found=scale.initial,
        )


def check_batch(data: DataSection, layout: Layout, where: str) -> int:
    """Return the number of micro-batches of a rank in a step; refuse unequal ones."""
    unit = layout.data * data.micro_batch
    if data.global_batch % unit:
        raise BadInput(
            where,
            "data.global_batch",
            expected=f"a multiple of data={layout.data} x micro_batch={data.micro_batch}",
            found=data.global_batch,
            todo=nearest_multiples("data.global_batch", unit, data.global_batch),
        )
    return data.global_batch // unit


def check_float8(
    compute: str | None, dtype: str, scaling: str | None, layout: Layout, schedule: str, where: str
) -> None:
    """Refuse what float8 cannot be combined with, and a scaling without float8."""
    if compute != "float8":
        if scaling is not None:
            expected, found = 'compute = "float8" beside it', f"compute = {compute}"
            raise BadInput(where, "float8_scaling", expected=expected, found=found)
        return
    if dtype == "float64":
        raise BadInput(where, "dtype", expected="float32 or bfloat16 with compute = float8", found=dtype)
    if layout.pipeline > 1 and schedule_kind(schedule).two_backwards:
        raise BadInput(
            where,
            "layout.schedule",
            expected="gpipe, 1f1b or interleaved with compute = float8",
            found=schedule,
            todo="Its backward comes in two parts, and each would compute all products of both",
        )


def check_idle(memory: MemorySection, watch: WatchSection, debug: DebugSection, where: str) -> None:
    """Refuse a key that does nothing because another is not set."""
    if memory.checkpoint_every is not None and memory.checkpointing != "every":
        raise BadInput(
            where,
            "memory.checkpoint_every",
            expected='checkpointing = "every" beside it',
            found=f'checkpointing = "{memory.checkpointing}"',
        )
    if debug.every is not None and not debug.collectives:
        raise BadInput(
            where, "debug.every", expected="collectives = true beside it", found="collectives = false"
        )
    if watch.activation_norms and not watch.norms:
        raise BadInput(
            where,
            "watch.activation_norms",
            expected="watch.norms, the steps between norms, beside it",
            found="watch.norms = 0",
        )


def check_memory_of_pipeline(memory: MemorySection, layout: Layout, name: str, where: str) -> None:
    """Refuse what saves memory elsewhere, but not under the pipeline schedule ``name``, or at twice the
    cost.
    """
    if layout.pipeline == 1:
        return
    kind = schedule_kind(name)
    if memory.stated_chunk and (name == "gpipe" or kind.two_backwards):
        raise BadInput(
            where,
            "memory.loss_chunk",
            expected=f"auto or 0 with layout.schedule={name}, or 1f1b or interleaved",
            found=memory.loss_chunk,
            todo="Several micro-batches wait for their backward after their losses, and each would hold a "
            "gradient of the output layer",
        )
    if memory.checkpointing != "none":
        check_recomputation(name, memory.checkpointing, where)


def check_compile(
    memory: MemorySection, layout: Layout, schedule: str, debug: DebugSection, where: str
) -> None:
    """Refuse what needs a block's operators one by one, which a graph hides."""
    twice = layout.pipeline > 1 and schedule_kind(schedule).two_backwards
    for wrong, key, expected, found in (
        (memory.checkpointing == "selective", "memory.checkpointing", "none, every or full", "selective"),
        (twice, "layout.schedule", "gpipe, 1f1b or interleaved", schedule),
        (debug.collectives, "debug.collectives", "false", "true"),
    ):
        if wrong:
            raise BadInput(where, key, expected=f"{expected} with compile = true", found=found)
