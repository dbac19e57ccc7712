"""Translate a DeepSpeed configuration (``ds_config.json``) to a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...parallel_state import BadInput
from .fsdp_and_accelerate import ULYSSES
from .translation import Given, Translation

_ADAMS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam")
_DTYPES = {
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
}

#: The learning rate of DeepSpeed's Adam, and of its WarmupLR and WarmupDecayLR, where the file says none.
_LR = 1e-3
#: Sections and keys that say how DeepSpeed does its work, not what is computed: nothing is lost.
_ENGINE = "how DeepSpeed does it; torch's FSDP2 and pipelining have no such setting"
#: For settings that change what is computed.
_OTHER = "there is nothing of this kind here"
_KNOWN = {
    "zero_optimization": _ENGINE,
    "zero_optimization.offload_optimizer.ratio": "all of it is offloaded",
    "bf16": _ENGINE,
    "torch_autocast": _ENGINE,
    "tensorboard": "event files are in the run's folder",
    "wall_clock_breakdown": "every step's seconds are in metrics.jsonl",
    "flops_profiler": "every step's tokens a second are in metrics.jsonl",
    "comms_logger": _ENGINE,
    "wandb": "metrics are in metrics.jsonl",
    "csv_monitor": "metrics are in metrics.jsonl",
    "zero_allow_untested_optimizer": "AdamW is what is tested here",
    "checkpoint": "checkpoints are whole in any layout; see [checkpoint]",
    "amp": 'apex; say compute = "bfloat16" or "float16" instead',
    "pipeline": "blocks are cut by what they cost, or by layout.split; docs/pipeline.md",
    "expert_parallel": "what its experts are, the model's config says; docs/experts.md",
    "use_data_before_expert_parallelism": "experts lie on neighbours among the data ranks",
    "seq_parallel_communication_data_type": "keys and values travel in the dtype of compute",
    "activation_checkpointing": "what is recomputed is kept nowhere: it is not cut, copied or packed",
}


def from_deepspeed(
    raw: Mapping[str, Any],
    where: str,
    *,
    ranks: int | None = None,
    autos: Mapping[str, Any] | None = None,
) -> Translation:
    """Translate a DeepSpeed configuration to a recipe, as far as there is one.

    ``ranks``: how many processes train; the file says it only if it has all three batch sizes. ``autos``: the
    value of each "auto", by dotted key. Raises ``BadInput`` for a file that is no such configuration or
    contradicts itself.
    """
    given = Given(raw, where, autos=autos)
    found = Translation(where)
    found.set("out", "run")
    found.set("device", "cuda")
    found.blank("steps", "how many updates")
    found.blank("model.init_from", "a Hugging Face folder, or model.config to start from scratch")
    found.blank("data.tokens", "what `trilith tokenize` wrote")
    found.blank("data.sequence_length", "tokens a row")
    _precision(given, found)
    _layout(given, found, ranks)
    _optimizer(given, found)
    _memory(given, found)
    if (every := given.whole("steps_per_print", least=1)) is not None:
        found.set("log_every", every)
    _reduction(given, found)
    if given.section("tensorboard").flag("enabled"):
        found.set("watch.trackers", ["tensorboard"])
    if not given.raw.keys() & _NAMES:
        raise BadInput(
            where,
            expected="a DeepSpeed configuration",
            found=f"keys {', '.join(list(given.raw)[:5]) or '(none)'}",
        )
    for key, value in given.left():
        found.miss(key, value, _KNOWN.get(key, _KNOWN.get(key.split(".")[0], _OTHER)))
    for key in given.unsaid():
        found.miss(key, "auto", "Hugging Face's Trainer fills it in: translate its training_args.json")
    found.check()
    return found


_NAMES = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "zero_optimization",
    "fp16",
    "bf16",
    "gradient_clipping",
    "activation_checkpointing",
}


def _precision(given: Given, found: Translation) -> None:
    half, brain = given.section("fp16"), given.section("bf16")
    if half.flag("enabled") and brain.flag("enabled"):
        raise given.bad("fp16.enabled", "fp16 or bf16", "both")
    cast = given.section("torch_autocast")
    if half.flag("enabled"):
        found.set("compute", "float16", "weights and moments stay in float32")
        _loss_scale(half, found)
    elif brain.flag("enabled"):
        found.set("compute", "bfloat16", "weights and moments stay in float32")
    elif cast.flag("enabled"):
        name = str(cast.text("dtype")).removeprefix("torch.")
        found.set("compute", _DTYPES.get(name, "bfloat16"), "weights and moments stay in float32")


def _loss_scale(half: Given, found: Translation) -> None:
    static = half.number("loss_scale", 0.0)
    if static:
        if math.frexp(static)[0] != 0.5:
            found.miss(half.path("loss_scale"), static, "not a power of two; the nearest below is taken")
        found.set("loss_scale.initial", 2.0 ** math.floor(math.log2(static)))
        found.set("loss_scale.growth_interval", 0, "a fixed scale; here it still halves at an overflow")
    else:
        found.set("loss_scale.initial", 2.0 ** (half.whole("initial_scale_power", 16, most=1023) or 0))
        found.set("loss_scale.growth_interval", half.whole("loss_scale_window", 1000))
    least = half.number("min_loss_scale", 1.0) or 1.0
    found.set(
        "loss_scale.minimum", min(2.0 ** math.floor(math.log2(least)), found.values["loss_scale.initial"])
    )
    if found.values["loss_scale.initial"] > 2.0**24:
        found.set("loss_scale.maximum", found.values["loss_scale.initial"])
    if (patience := half.whole("hysteresis", 2)) != 1 and not static:
        found.miss(half.path("hysteresis"), patience, "the scale halves at the first overflow")


def _layout(given: Given, found: Translation, ranks: int | None) -> None:
    tensor, pipeline = given.section("tensor_parallel"), given.section("pipeline")
    t = tensor.whole("autotp_size", least=1) or tensor.section("tp").whole("tp_size", least=1) or 1
    p = pipeline.value("stages")
    p = p if isinstance(p, int) and not isinstance(p, bool) and p > 0 else 1
    c = given.whole("sequence_parallel_size", least=1) or 1
    experts = given.section("expert_parallel")
    e = experts.whole("autoep_size", least=1) if experts.flag("enabled") else None
    total, micro, steps = (
        given.whole("train_batch_size", least=1),
        given.whole("train_micro_batch_size_per_gpu", least=1),
        given.whole("gradient_accumulation_steps", least=1),
    )
    data = 1
    if ranks is not None:
        if ranks % (t * p * c):
            axes = f"tensor={t} x pipeline={p}" + (f" x context={c}" if c > 1 else "")
            raise BadInput("--ranks", expected=f"a multiple of {axes}", found=ranks)
        data = ranks // (t * p * c)
    elif total and micro and steps:
        data = total // (micro * steps) or 1
    else:
        found.miss("ranks", None, "the file does not say how many there are: taken as one; say --ranks")
    if total and not micro:
        micro = total // (data * (steps or 1)) or 1
    found.set("data.micro_batch", micro or 1)
    each = (micro or 1) * data
    if total and (total % each or (steps and total != each * steps)):
        expected = f"micro-batches of {micro} x {steps or 'some'} steps x {data} data ranks"
        raise given.bad("train_batch_size", expected, total)
    if total or micro:
        found.set("data.global_batch", total or each * (steps or 1))
    else:
        found.blank("data.global_batch", "rows a step, over all ranks")
    if c > 1:
        found.set("layout.context", c, ULYSSES)
    for key, value in (("tensor", t), ("pipeline", p), ("data", data), ("expert", e or 1)):
        if value > 1 or key == "data":
            found.set(f"layout.{key}", value)
    if every := pipeline.whole("activation_checkpoint_interval"):
        found.set("memory.checkpointing", "full", f"of stretches of {every} blocks" if every > 1 else "")


def _optimizer(given: Given, found: Translation) -> None:
    section = given.section("optimizer")
    kind, params = section.text("type"), section.section("params")
    if kind is not None and kind.lower().replace("_", "") not in _ADAMS:
        found.miss("optimizer.type", kind, "AdamW is the only optimizer here")
    elif kind is None:
        found.miss("optimizer", None, "made in the program, so the file does not say it: AdamW's defaults")
    if (rate := params.number("lr")) is not None:
        found.set("optimizer.lr", rate)
    elif params.raw.get("lr") != "auto":
        found.set("optimizer.lr", _LR, "DeepSpeed's and torch's where none is said")
    betas = params.value("betas")
    found.set("optimizer.betas", betas if betas is not None else [0.9, 0.999])
    found.set("optimizer.eps", params.number("eps", 1e-8))
    decay = params.number("weight_decay", 0.0) or 0.0
    found.set("optimizer.weight_decay", decay, "of matrices alone" if decay else "")
    if params.raw.get("adam_w_mode") is False and decay:
        found.miss("optimizer.params.adam_w_mode", False, "weight decay is AdamW's, not L2")
    for ignored in ("adam_w_mode", "torch_adam", "fused", "bias_correction"):
        if not (ignored == "bias_correction" and params.raw.get(ignored) is False):
            params.value(ignored)
    found.set("optimizer.clip", given.number("gradient_clipping", 0.0))
    _schedule(given, found, rate)


def _schedule(given: Given, found: Translation, rate: float | None) -> None:
    """Set the schedule. ``rate`` is the optimizer's; WarmupLR and WarmupDecayLR set their own over it."""
    section = given.section("scheduler")
    kind, params = section.text("type"), section.section("params")
    found.set("optimizer.schedule", "constant")
    known = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind is None:
        return
    if kind not in known:
        found.miss(
            "scheduler.type", kind, f"one of {', '.join(known)} has a counterpart; the rate is constant"
        )
        return
    found.set("optimizer.schedule", known[kind])
    if kind != "WarmupCosineLR":
        _peak(params, found, kind, rate)
    if params.number("warmup_min_lr", 0.0):
        found.miss(
            "scheduler.params.warmup_min_lr", params.value("warmup_min_lr"), "the warm-up begins near 0"
        )
    if (warmup := params.whole("warmup_num_steps", 1000)) is not None:
        found.set("optimizer.warmup", warmup)
    if (shape := params.text("warmup_type") or "log") != "linear":
        found.miss("scheduler.params.warmup_type", shape, "the warm-up is a straight line")
    if (total := params.whole("total_num_steps", least=1)) is not None:
        found.set("steps", total)
    least = (params.number("cos_min_ratio", 1e-4) or 0.0) if kind == "WarmupCosineLR" else 0.0
    if kind == "WarmupCosineLR" and params.number("warmup_min_ratio", 0.0):
        found.miss("scheduler.params.warmup_min_ratio", params.value("warmup_min_ratio"), "it begins near 0")
    found.set("optimizer.minimum_ratio", least)


def _peak(params: Given, found: Translation, kind: str, rate: float | None) -> None:
    peak = params.number("warmup_max_lr")
    if peak is None and params.raw.get("warmup_max_lr") == "auto":
        return
    said = (
        "the scheduler's warmup_max_lr" if peak is not None else f"{kind}'s where warmup_max_lr is not said"
    )
    peak = _LR if peak is None else peak
    found.set("optimizer.lr", peak, said)
    if rate is not None and rate != peak:
        found.miss("optimizer.params.lr", rate, f"{kind} writes over it: {peak:g}")


def _memory(given: Given, found: Translation) -> None:
    zero = given.section("zero_optimization")
    stage = zero.whole("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise zero.bad("stage", "0, 1, 2 or 3", stage)
    found.set("layout.zero", stage)
    for key in ("offload_param", "offload_optimizer"):
        device = zero.section(key).text("device") or "none"
        if device not in ("none", "cpu", "nvme"):
            raise zero.bad(f"{key}.device", "none, cpu or nvme", device)
        if device != "none":
            found.set("memory.offload", True, "weights, gradients and moments together")
        if device == "nvme":
            found.miss(zero.path(f"{key}.device"), device, "to the host's memory, not to a disk")
    if zero.flag("cpu_offload"):
        found.set("memory.offload", True, "weights, gradients and moments together")
    shard, data = zero.whole("mics_shard_size", -1, least=-1) or -1, found.values["layout.data"]
    if shard > 0 and stage and data > shard:
        if data % shard:
            raise zero.bad("mics_shard_size", f"a divisor of the {data} data ranks", shard)
        found.set("layout.data_replicate", data // shard, f"MiCS: replicas of {shard} shards each")
    if "activation_checkpointing" in given.raw:
        found.set("memory.checkpointing", "full", "the section says how; that it is done, the model's code")
    given.section("activation_checkpointing")  # its keys are listed


def _reduction(given: Given, found: Translation) -> None:
    """Set the dtype in which gradients are summed; DeepSpeed's default is the one they are computed in."""
    for key, value in (
        ("communication_data_type", given.text("communication_data_type")),
        ("data_types.grad_accum_dtype", given.section("data_types").text("grad_accum_dtype")),
    ):
        if value is not None:
            if value not in _DTYPES:
                raise given.bad(key, f"one of {', '.join(_DTYPES)}", value)
            if found.values.get("reduce", _DTYPES[value]) != _DTYPES[value]:
                found.miss("communication_data_type", found.values["reduce"], "data_types counts here")
            found.set("reduce", _DTYPES[value])
    if given.flag("fp32_allreduce"):
        found.set("reduce", "float32")
