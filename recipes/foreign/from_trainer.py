"""Translate Hugging Face TrainingArguments (``training_args.json``, by ``to_json_string``) to a recipe."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args

from ...runs.trackers import TrackerName
from ..sections import CheckpointSection
from .parallel_in_trainer import deepspeed_file, fsdp, parallelism, read_sizes, with_arguments
from .translation import ForeignConfig, RecipeDraft, half_dtype, set_compute

_SCHEDULES = {
    **{name: name for name in ("linear", "cosine", "constant", "inverse_sqrt")},
    **{"constant_with_warmup": "constant", "polynomial": "linear", "warmup_stable_decay": "wsd"},
    **dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), "cosine"),
}


def from_trainer(raw: Mapping[str, Any], where: str, *, ranks: int | None = None) -> RecipeDraft:
    """Translate TrainingArguments to a recipe, as far as there is one.

    A DeepSpeed configuration that they name is read as well, beside the file or as named, and its "auto"
    values are filled in from here. ``ranks``: how many processes train; the file does not say. Raises
    ``BadInput`` for a file of another kind, or one that contradicts itself.
    """
    keys = {"output_dir", "per_device_train_batch_size", "learning_rate", "num_train_epochs", "max_steps"}
    ForeignConfig(raw, where).check_kind(keys, "TrainingArguments")
    defaults = _defaults()
    arguments = {key: value for key, value in raw.items() if value not in (None, "auto")}
    config = ForeignConfig(defaults | arguments, where)
    draft = RecipeDraft(where)
    deepspeed: Mapping[str, Any] = {}
    sizes, in_file = read_sizes(config), config.value("deepspeed")
    if ranks is None and (sizes.shard * sizes.replicate > 1 or (sizes.ranks > 1 and not in_file)):
        ranks = sizes.ranks
    if in_file:
        deepspeed, where = deepspeed_file(config)
        draft = with_arguments(deepspeed, where, config.raw, sizes, ranks)
    elif ranks is None:
        draft.miss_ranks("one")
    draft.set("out", config.text("output_dir") or "run")
    draft.set("device", "cpu" if config.flag("use_cpu") or config.flag("no_cuda") else "cuda")
    draft.set("seed", config.whole("seed"))
    _rows(config, draft)
    if deepspeed and ranks is None:
        ranks = draft.values["layout.data"] * sizes.tensor * sizes.context
    parallelism(config, draft, sizes, ranks or 1)
    micro_batch = config.whole("per_device_train_batch_size", least=1) or 1
    accumulation = config.whole("gradient_accumulation_steps", least=1) or 1
    draft.set("data.micro_batch", micro_batch)
    draft.set("data.global_batch", micro_batch * accumulation * draft.values["layout.data"])
    steps = _steps(config, draft)
    set_compute(draft, half_dtype(config, "fp16", fp16=config.flag("fp16"), bf16=config.flag("bf16")))
    _optimizer(config, draft, deepspeed)
    _schedule(config, draft, steps, deepspeed.get("scheduler") or {})
    fsdp(config, draft, ranks or 1)
    if sizes.shard > 1 and not draft.values.get("layout.zero"):  # shards that shard nothing
        draft.values.pop("layout.data_replicate", None)
        draft.miss("parallelism_config.dp_shard_size", sizes.shard, "fsdp is off; set layout.zero")
    if config.flag("gradient_checkpointing") or config.flag("activation_checkpointing"):
        draft.set("memory.checkpointing", "full")
    for key in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        config.section(key)  # its keys are listed
    _saving(config, draft, steps)
    _watching(config, draft)
    return draft.finish(config, "trainer", defaults)


def _rows(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Translate TRL's keys: the length of rows, and how conversations become rows."""
    length = config.whole("max_length", least=1) or config.whole("max_seq_length", least=1)
    draft.set("data.sequence_length", length)
    if (packing := config.value("packing")) is not None:
        remark = "of conversations: `trilith tokenize --chat` makes the tokens"
        draft.set("data.samples", "packed" if packing else "single", remark)


def _steps(config: ForeignConfig, draft: RecipeDraft) -> int | None:
    """Translate ``max_steps``; for epochs, the number of steps depends on the data."""
    steps = config.whole("max_steps", least=-1) or -1
    epochs = config.number("num_train_epochs")
    if steps > 0:
        draft.set("steps", steps)
        return steps
    total = draft.values.get("steps")
    if not isinstance(total, int):
        draft.miss("num_train_epochs", epochs, "steps are these epochs x rows / data.global_batch")
    return total


def _optimizer(config: ForeignConfig, draft: RecipeDraft, deepspeed: Mapping[str, Any]) -> None:
    """Translate the optimizer; the learning rate in DeepSpeed's configuration, if any, counts."""
    rate = config.number("learning_rate")
    warms_up = (deepspeed.get("scheduler") or {}).get("type") in ("WarmupLR", "WarmupDecayLR")
    if not (warms_up or deepspeed.get("optimizer")):
        draft.set("optimizer.lr", rate)
    elif draft.values.get("optimizer.lr") != rate:
        draft.miss("learning_rate", rate, "DeepSpeed's file says another, which counts")
    kind = config.text("optim") or ""
    if not (kind.startswith("adamw_") and "bit" not in kind and "bnb" not in kind and "paged" not in kind):
        draft.miss("optim", kind, "AdamW is the only optimizer here")
    draft.set("optimizer.betas", [config.number("adam_beta1"), config.number("adam_beta2")])
    draft.set("optimizer.eps", config.number("adam_epsilon"))
    draft.set("optimizer.weight_decay", config.number("weight_decay"))
    draft.set("optimizer.clip", config.number("max_grad_norm"))
    draft.set("optimizer.label_smoothing", config.number("label_smoothing_factor") or None)


def _schedule(
    config: ForeignConfig, draft: RecipeDraft, steps: int | None, scheduler: Mapping[str, Any]
) -> None:
    """Translate the schedule. ``scheduler``: DeepSpeed's, which counts if there is one."""
    kind = config.text("lr_scheduler_type") or "linear"
    options = config.section("lr_scheduler_kwargs")
    if scheduler:
        if (scheduler.get("params") or {}).get("warmup_num_steps") == "auto":
            _warmup(config, draft, steps, kind)
        return
    schedule = _SCHEDULES.get(kind)
    if schedule is None:
        schedule = "cosine" if kind.startswith("cosine") else "constant"
        draft.miss("lr_scheduler_type", kind, f"there is no such schedule here; taken as {schedule}")
    draft.set("optimizer.schedule", schedule)
    rate, least = draft.values["optimizer.lr"] or 1.0, 0.0
    if kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        least = options.number("min_lr_rate") or (options.number("min_lr", 0.0) or 0.0) / rate
    elif kind == "polynomial":
        least = (options.number("lr_end", 1e-7) or 0.0) / rate
    elif kind == "warmup_stable_decay":
        least = options.number("min_lr_ratio", 0.0) or 0.0
        draft.set("optimizer.decay", options.whole("num_decay_steps", least=1))
        draft.set("optimizer.decay_shape", options.text("decay_type") or "cosine")
    draft.set("optimizer.minimum_ratio", least)
    _warmup(config, draft, steps, kind)


def _warmup(config: ForeignConfig, draft: RecipeDraft, steps: int | None, kind: str) -> None:
    """Translate the warm-up; ``warmup_steps`` below 1 is a share of the run, as ``warmup_ratio`` is."""
    warmup, share = config.number("warmup_steps") or 0.0, config.number("warmup_ratio") or 0.0
    config.require(share <= 1, "warmup_ratio", "a share of the steps, from 0 to 1", share)
    if 0 < warmup < 1:
        warmup, share = 0.0, warmup
    if kind == "constant":
        warmup = share = 0.0
    if warmup or not share:
        draft.set("optimizer.warmup", int(warmup))
    elif steps is not None:
        draft.set("optimizer.warmup", math.ceil(share * steps), f"{share:g} of the steps")
    else:
        draft.set("optimizer.warmup", 0)
        draft.miss("warmup_ratio", share, "a share of steps that the file does not say; set optimizer.warmup")


def _saving(config: ForeignConfig, draft: RecipeDraft, steps: int | None) -> None:
    for kind, key in (("save", "checkpoint.every"), ("logging", "log_every")):
        strategy = config.text(f"{kind}_strategy") or "steps"
        interval = config.number(f"{kind}_steps") or 0
        if 0 < interval < 1 and steps is not None:
            interval = math.ceil(interval * steps)
        if strategy == "steps" and interval >= 1:
            draft.set(key, int(interval))
        elif strategy != "no" and (setting := interval if strategy == "steps" else strategy):
            draft.miss(f"{kind}_strategy", setting, f"set {key} in steps")
    if keep := config.whole("save_total_limit", least=0):
        draft.set("checkpoint.keep", keep)
    elif "checkpoint.every" in draft.values:
        newest = CheckpointSection().keep
        draft.miss("save_total_limit", keep, f"only the newest {newest} stay; set checkpoint.keep for more")


def _watching(config: ForeignConfig, draft: RecipeDraft) -> None:
    names = config.value("report_to") or []
    trackers = []
    for name in names if isinstance(names, list) else [names]:
        if name in get_args(TrackerName):
            trackers.append(name)
        elif name not in ("none", "all"):
            draft.miss("report_to", name, "give its Accelerate tracker to trilith.training.run")
    draft.set("watch.trackers", trackers or None)


def _defaults() -> dict[str, Any]:
    """Return what the installed transformers writes where nothing was asked for."""
    from transformers import TrainingArguments

    return {
        field.name: getattr(field.default, "value", field.default)
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(TrainingArguments)
    }
