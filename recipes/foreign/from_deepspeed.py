"""Translate a DeepSpeed configuration (``ds_config.json``) to a recipe."""

from collections.abc import Mapping
from typing import Any

from ...parallel_state import BadInput
from .translation import ULYSSES, ForeignConfig, RecipeDraft, half_dtype, set_compute, set_loss_scale

_ADAMS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam")
_DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
    **{"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"},
}

#: The learning rate of DeepSpeed's Adam, and of its WarmupLR and WarmupDecayLR, where the file says none.
_LR = 1e-3
#: The schedule here that each of DeepSpeed's becomes.
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def from_deepspeed(
    raw: Mapping[str, Any], where: str, *, ranks: int | None = None, autos: Mapping[str, Any] | None = None
) -> RecipeDraft:
    """Translate a DeepSpeed configuration to a recipe, as far as there is one.

    ``ranks``: how many processes train; the file says it only if it has all three batch sizes. ``autos``: the
    value of each "auto", by dotted key. Raises ``BadInput`` for a file that is no such configuration or
    contradicts itself.
    """
    config = ForeignConfig(raw, where, autos=autos)
    config.check_kind(_NAMES, "a DeepSpeed configuration")
    draft = RecipeDraft(where)
    draft.set("out", "run")
    draft.set("device", "cuda")
    _precision(config, draft)
    _layout(config, draft, ranks)
    _optimizer(config, draft)
    _memory(config, draft)
    draft.set("log_every", config.whole("steps_per_print", least=1))
    _reduction(config, draft)
    if config.section("tensorboard").flag("enabled"):
        draft.set("watch.trackers", ["tensorboard"])
    for key in config.unknown_autos():
        draft.miss(key, "auto", "Hugging Face's Trainer fills it in: translate its training_args.json")
    return draft.finish(config, "deepspeed")


_NAMES = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer"),
    *("scheduler", "zero_optimization", "fp16", "bf16", "gradient_clipping", "activation_checkpointing"),
}


def _precision(config: ForeignConfig, draft: RecipeDraft) -> None:
    fp16, autocast = config.section("fp16"), config.section("torch_autocast")
    bf16 = config.section("bf16").flag("enabled")
    dtype = half_dtype(config, "fp16.enabled", fp16=fp16.flag("enabled"), bf16=bf16)
    if dtype is None and autocast.flag("enabled"):
        name = (autocast.text("dtype") or "bfloat16").removeprefix("torch.")
        autocast.require(name in _DTYPES, "dtype", " or ".join(_DTYPES), name)
        dtype = _DTYPES[name]
    set_compute(draft, dtype)
    if fp16.flag("enabled"):
        static = fp16.number("loss_scale", 0.0)
        initial = static or 2.0 ** (fp16.whole("initial_scale_power", 16, most=1023) or 0)
        set_loss_scale(fp16, draft, initial, static=bool(static))


def _layout(config: ForeignConfig, draft: RecipeDraft, ranks: int | None) -> None:
    section, pipeline = config.section("tensor_parallel"), config.section("pipeline")
    tensor = section.whole("autotp_size", least=1) or section.section("tp").whole("tp_size", least=1) or 1
    stages = pipeline.value("stages")
    stages = stages if isinstance(stages, int) and not isinstance(stages, bool) and stages > 0 else 1
    context = config.whole("sequence_parallel_size", least=1) or 1
    experts = config.section("expert_parallel")
    expert = experts.whole("autoep_size", least=1) if experts.flag("enabled") else None
    rows = config.whole("train_batch_size", least=1)
    micro_batch = config.whole("train_micro_batch_size_per_gpu", least=1)
    accumulation = config.whole("gradient_accumulation_steps", least=1)
    data, replica_size = 1, tensor * stages * context
    if ranks is not None:
        if ranks % replica_size:
            axes = f"tensor={tensor} x pipeline={stages}" + (f" x context={context}" if context > 1 else "")
            raise BadInput("--ranks", expected=f"a multiple of {axes}", found=ranks)
        data = ranks // replica_size
    elif rows and micro_batch and accumulation:
        data = rows // (micro_batch * accumulation) or 1
    else:
        draft.miss_ranks("one")
    if rows and not micro_batch:
        micro_batch = rows // (data * (accumulation or 1)) or 1
    draft.set("data.micro_batch", micro_batch or 1)
    unit = (micro_batch or 1) * data
    fits = not rows or rows == unit * (accumulation or rows // unit)
    expected = f"micro-batches of {micro_batch} x {accumulation or 'some'} steps x {data} data ranks"
    config.require(fits, "train_batch_size", expected, rows)
    draft.set("data.global_batch", rows or (micro_batch and unit * (accumulation or 1)))
    if context > 1:
        draft.set("layout.context", context, ULYSSES)
    draft.set_axes(tensor=tensor, pipeline=stages)
    draft.set("layout.data", data)
    draft.set_axes(expert=expert or 1)
    if interval := pipeline.whole("activation_checkpoint_interval"):
        remark = f"of stretches of {interval} blocks" if interval > 1 else ""
        draft.set("memory.checkpointing", "full", remark)


def _optimizer(config: ForeignConfig, draft: RecipeDraft) -> None:
    section = config.section("optimizer")
    kind, params = section.text("type"), section.section("params")
    if kind is not None and kind.lower().replace("_", "") not in _ADAMS:
        draft.miss("optimizer.type", kind, "AdamW is the only optimizer here")
    elif kind is None:
        draft.miss("optimizer", None, "made in the program, so the file does not say it: AdamW's defaults")
    if (rate := params.number("lr")) is not None:
        draft.set("optimizer.lr", rate)
    elif params.raw.get("lr") != "auto":
        draft.set("optimizer.lr", _LR, "DeepSpeed's and torch's where none is said")
    draft.set("optimizer.betas", [0.9, 0.999])
    draft.set("optimizer.betas", params.value("betas"))
    draft.set("optimizer.eps", params.number("eps", 1e-8))
    decay = params.number("weight_decay", 0.0) or 0.0
    draft.set("optimizer.weight_decay", decay, "of matrices alone" if decay else "")
    if params.raw.get("adam_w_mode") is False and decay:
        draft.miss("optimizer.params.adam_w_mode", False, "weight decay is AdamW's, not L2")
    draft.set("optimizer.clip", config.number("gradient_clipping", 0.0))
    _schedule(config, draft, rate)


def _schedule(config: ForeignConfig, draft: RecipeDraft, rate: float | None) -> None:
    """Set the schedule. ``rate`` is the optimizer's; WarmupLR and WarmupDecayLR set their own over it."""
    section = config.section("scheduler")
    kind, params = section.text("type"), section.section("params")
    draft.set("optimizer.schedule", _SCHEDULES.get(kind or "", "constant"))
    if kind is None:
        return
    if kind not in _SCHEDULES:
        why = f"one of {', '.join(_SCHEDULES)} has a counterpart; the rate is constant"
        draft.miss("scheduler.type", kind, why)
        return
    cosine = kind == "WarmupCosineLR"
    if not cosine:
        _peak(params, draft, kind, rate)
    draft.set("optimizer.warmup", params.whole("warmup_num_steps", 1000))
    if (shape := params.text("warmup_type") or "log") != "linear":
        draft.miss("scheduler.params.warmup_type", shape, "the warm-up is a straight line")
    draft.set("steps", params.whole("total_num_steps", least=1))
    draft.set("optimizer.minimum_ratio", (params.number("cos_min_ratio", 1e-4) or 0.0) if cosine else 0.0)


def _peak(params: ForeignConfig, draft: RecipeDraft, kind: str, rate: float | None) -> None:
    peak, remark = params.number("warmup_max_lr"), "the scheduler's warmup_max_lr"
    if peak is None:
        if params.raw.get("warmup_max_lr") == "auto":
            return
        peak, remark = _LR, f"{kind}'s where warmup_max_lr is not said"
    draft.set("optimizer.lr", peak, remark)
    if rate is not None and rate != peak:
        draft.miss("optimizer.params.lr", rate, f"{kind} writes over it: {peak:g}")


def _memory(config: ForeignConfig, draft: RecipeDraft) -> None:
    zero = config.section("zero_optimization")
    stage = zero.whole("stage", 0)
    zero.require(stage in (0, 1, 2, 3), "stage", "0, 1, 2 or 3", stage)
    draft.set("layout.zero", stage)
    for key in ("offload_param", "offload_optimizer"):
        device = zero.section(key).one_of("device", ("none", "cpu", "nvme")) or "none"
        if device != "none":
            draft.set_offload()
        if device == "nvme":
            draft.miss(zero.path(f"{key}.device"), device, "to the host's memory, not to a disk")
    if zero.flag("cpu_offload"):
        draft.set_offload()
    shard, data = zero.whole("mics_shard_size", -1, least=-1) or -1, draft.values["layout.data"]
    if shard > 0 and stage and data > shard:
        zero.require(data % shard == 0, "mics_shard_size", f"a divisor of the {data} data ranks", shard)
        draft.set("layout.data_replicate", data // shard, f"MiCS: replicas of {shard} shards each")
    if "activation_checkpointing" in config.raw:
        draft.set("memory.checkpointing", "full", "the section says how; that it is done, the model's code")
    config.section("activation_checkpointing")  # its keys are listed


def _reduction(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the dtype in which gradients are summed; DeepSpeed's default is the one they are computed in."""
    reduced = config.one_of("communication_data_type", _DTYPES)
    summed = config.section("data_types").one_of("grad_accum_dtype", _DTYPES)
    if reduced and summed and _DTYPES[reduced] != _DTYPES[summed]:
        draft.miss("communication_data_type", _DTYPES[reduced], "data_types counts here")
    if dtype := summed or reduced:
        draft.set("reduce", _DTYPES[dtype])
    if config.flag("fp32_allreduce"):
        draft.set("reduce", "float32")
