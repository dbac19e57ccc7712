"""Translate Hugging Face TrainingArguments (``training_args.json``, by ``to_json_string``) to a recipe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args

from ...parallel_state import BadInput
from ...runs.named_trackers import TrackerName
from .deepspeed_in_trainer import deepspeed_file, with_arguments
from .fsdp_and_accelerate import check_shards, fsdp, into_deepspeed, parallelism, read_sizes
from .translation import Given, Translation

_OTHER = "there is nothing of this kind here"
#: Keys that say nothing about what is trained, or what is so here anyway.
_MEANINGLESS = frozenset(
    (
        "hub_token",
        "hub_model_id",
        "push_to_hub",
        "log_level",
        "log_level_replica",
        "logging_dir",
        "run_name",
        "disable_tqdm",
        "local_rank",
        "do_train",
        "do_eval",
        "do_predict",
        "dataloader_pin_memory",
        "dataloader_num_workers",
        "dataloader_drop_last",
        "ddp_backend",
        "ddp_timeout",
        "ddp_find_unused_parameters",
        "remove_unused_columns",
        "overwrite_output_dir",
        "per_device_eval_batch_size",
        "fp16_backend",
        "half_precision_backend",
        "accelerator_config",
        "save_safetensors",
        "save_only_model",
        "_n_gpu",
    )
)
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "polynomial": "linear",
    "warmup_stable_decay": "wsd",
}
#: Why keys of a section are left, where there is a better reason.
_KNOWN = {
    "fsdp_config": "each block is wrapped, and FSDP2 is used, as torch has it",
    "gradient_checkpointing_kwargs": "full checkpointing has no settings",
    "activation_checkpointing_kwargs": "full checkpointing has no settings",
}


def from_trainer(raw: Mapping[str, Any], where: str, *, ranks: int | None = None) -> Translation:
    """Translate TrainingArguments to a recipe, as far as there is one.

    A DeepSpeed configuration that they name is read as well, beside the file or as named, and its "auto"
    values are filled in from here. ``ranks``: how many processes train; the file does not say. Raises
    ``BadInput`` for a file of another kind, or one that contradicts itself.
    """
    known = {"output_dir", "per_device_train_batch_size", "learning_rate", "num_train_epochs", "max_steps"}
    if not raw.keys() & known:
        keys = ", ".join(list(raw)[:5]) or "(none)"
        raise BadInput(where, expected="TrainingArguments", found=f"keys {keys}")
    given = Given(raw, where)
    found = Translation(where)
    theirs: Mapping[str, Any] = {}
    sizes = read_sizes(given)
    if given.value("deepspeed"):
        theirs, where = deepspeed_file(given)
        found = with_arguments(into_deepspeed(theirs, sizes), where, given.raw, ranks)
    elif ranks is None and sizes.ranks > 1:
        ranks = sizes.ranks
    elif ranks is None:
        found.miss("ranks", None, "the file does not say how many there are: taken as one; say --ranks")
    found.set("out", given.text("output_dir") or "run")
    found.set("device", "cpu" if given.flag("use_cpu") or given.flag("no_cuda") else "cuda")
    found.set("seed", given.whole("seed", 42))
    found.blank("model.init_from", "a Hugging Face folder, or model.config to start from scratch")
    found.blank("data.tokens", "what `trilith tokenize` wrote")
    length = given.whole("max_length", least=1) or given.whole(
        "max_seq_length", least=1
    )  # of TRL's SFTConfig
    if length:
        found.set("data.sequence_length", length)
    else:
        found.blank("data.sequence_length", "tokens a row")
    _rows(given, found)
    if theirs and ranks is None:
        ranks = found.values["layout.data"] * sizes.tensor * sizes.context
    parallelism(given, found, sizes, ranks or 1)
    _batch(given, found)
    steps = _steps(given, found)
    _precision(given, found)
    _optimizer(given, found, theirs)
    _schedule(given, found, steps, theirs.get("scheduler") or {})
    fsdp(given, found, ranks or 1)
    check_shards(found, sizes)
    if given.flag("gradient_checkpointing") or given.flag("activation_checkpointing"):
        found.set("memory.checkpointing", "full")
    for key in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        given.section(key).value("use_reentrant")  # the same numbers either way
    _saving(given, found, steps)
    _watching(given, found)
    defaults = _defaults()
    for key, value in given.left():
        if key not in _MEANINGLESS and not (key in defaults and defaults[key] == value):
            found.miss(key, value, _KNOWN.get(key.split(".")[0], _OTHER))
    found.check()
    return found


def _rows(given: Given, found: Translation) -> None:
    """Translate TRL's keys: how conversations become rows."""
    packing = given.value("packing")
    if packing is not None:
        what = "packed" if packing else "single"
        found.set("data.samples", what, "of conversations: `trilith tokenize --chat` makes the tokens")
    if given.flag("assistant_only_loss"):
        found.miss("assistant_only_loss", True, "`trilith tokenize --chat` says it: only these are learnt")


def _batch(given: Given, found: Translation) -> None:
    micro = given.whole("per_device_train_batch_size", 8, least=1) or 1
    steps = given.whole("gradient_accumulation_steps", 1, least=1) or 1
    found.set("data.micro_batch", micro)
    found.set("data.global_batch", micro * steps * found.values["layout.data"])


def _steps(given: Given, found: Translation) -> int | None:
    """Translate ``max_steps``; for epochs, the number of steps depends on the data."""
    steps = given.whole("max_steps", -1, least=-1) or -1
    epochs = given.number("num_train_epochs", 3.0)
    if steps > 0:
        found.set("steps", steps)
        return steps
    total = found.values.get("steps")
    if not isinstance(total, int):
        found.blank("steps", f"{epochs:g} epochs x rows / data.global_batch")
        found.miss("num_train_epochs", epochs, "a run is so many steps, whatever the size of the data")
    return total


def _precision(given: Given, found: Translation) -> None:
    half, brain = given.flag("fp16"), given.flag("bf16")
    if half and brain:
        raise given.bad("fp16", "fp16 or bf16", "both")
    if half or brain:
        found.set("compute", "float16" if half else "bfloat16", "weights and moments stay in float32")


def _optimizer(given: Given, found: Translation, theirs: Mapping[str, Any]) -> None:
    """Translate the optimizer. ``theirs``: DeepSpeed's configuration; the rate in it, if any, counts."""
    rate = given.number("learning_rate", 5e-5)
    peaked = (theirs.get("scheduler") or {}).get("type") in ("WarmupLR", "WarmupDecayLR")
    if not (peaked or theirs.get("optimizer")):
        found.set("optimizer.lr", rate)
    elif found.values.get("optimizer.lr") != rate:
        found.miss("learning_rate", rate, "DeepSpeed's file says another, which counts")
    kind = given.text("optim") or "adamw_torch"
    if not (kind.startswith("adamw_") and "bit" not in kind and "bnb" not in kind and "paged" not in kind):
        found.miss("optim", kind, "AdamW is the only optimizer here")
    found.set("optimizer.betas", [given.number("adam_beta1", 0.9), given.number("adam_beta2", 0.999)])
    found.set("optimizer.eps", given.number("adam_epsilon", 1e-8))
    found.set("optimizer.weight_decay", given.number("weight_decay", 0.0))
    found.set("optimizer.clip", given.number("max_grad_norm", 1.0))
    if smoothing := given.number("label_smoothing_factor", 0.0):
        found.set("optimizer.label_smoothing", smoothing)


def _schedule(given: Given, found: Translation, steps: int | None, theirs: Mapping[str, Any]) -> None:
    """Translate the schedule. ``theirs``: DeepSpeed's scheduler, which counts if there is one."""
    kind = given.text("lr_scheduler_type") or "linear"
    more = given.section("lr_scheduler_kwargs")
    if theirs:
        if theirs.get("params", {}).get("warmup_num_steps") == "auto":
            _warmup(given, found, steps, kind)
        return
    if kind not in _SCHEDULES:
        near = "cosine" if kind.startswith("cosine") else "constant"
        found.miss("lr_scheduler_type", kind, f"there is no such schedule here; taken as {near}")
    found.set(
        "optimizer.schedule", _SCHEDULES.get(kind, "cosine" if kind.startswith("cosine") else "constant")
    )
    rate, least = found.values["optimizer.lr"] or 1.0, 0.0
    if kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        least = more.number("min_lr_rate") or (more.number("min_lr", 0.0) or 0.0) / rate
    elif kind == "polynomial":
        least = (more.number("lr_end", 1e-7) or 0.0) / rate
        if (power := more.number("power", 1.0)) != 1.0:
            found.miss("lr_scheduler_kwargs.power", power, "the rate falls in a straight line")
    elif kind == "warmup_stable_decay":
        least = more.number("min_lr_ratio", 0.0) or 0.0
        if (decay := more.whole("num_decay_steps", least=1)) is not None:
            found.set("optimizer.decay", decay)
        found.set("optimizer.decay_shape", more.text("decay_type") or "cosine")
        if (shape := more.text("warmup_type") or "linear") != "linear":
            found.miss("lr_scheduler_kwargs.warmup_type", shape, "the warm-up is a straight line")
    found.set("optimizer.minimum_ratio", least)
    _warmup(given, found, steps, kind)


def _warmup(given: Given, found: Translation, steps: int | None, kind: str) -> None:
    """Translate the warm-up; ``warmup_steps`` below 1 is a share of the run, as ``warmup_ratio`` is."""
    warmup, share = given.number("warmup_steps", 0.0) or 0.0, given.number("warmup_ratio", 0.0) or 0.0
    if share > 1:
        raise given.bad("warmup_ratio", "a share of the steps, from 0 to 1", share)
    if 0 < warmup < 1:
        warmup, share = 0.0, warmup
    if kind == "constant":
        warmup = share = 0.0
    if warmup or not share:
        found.set("optimizer.warmup", int(warmup))
    elif steps is not None:
        found.set("optimizer.warmup", math.ceil(share * steps), f"{share:g} of the steps")
    else:
        found.set("optimizer.warmup", 0)
        found.miss("warmup_ratio", share, "a share of steps that the file does not say; set optimizer.warmup")


def _saving(given: Given, found: Translation, steps: int | None) -> None:
    for kind, key, default in (("save", "checkpoint.every", 0), ("logging", "log_every", 10)):
        strategy = given.text(f"{kind}_strategy") or "steps"
        every = given.number(f"{kind}_steps", 500)
        assert every is not None
        if 0 < every < 1 and steps is not None:
            every = math.ceil(every * steps)
        if strategy == "steps" and every >= 1:
            found.set(key, int(every))
        elif strategy not in ("no", "steps") or (strategy == "steps" and every > 0):
            what = every if strategy == "steps" else strategy
            found.miss(f"{kind}_strategy", what, f"set {key} in steps")
            found.set(key, default)
    keep = given.whole("save_total_limit", least=0)
    if keep:
        found.set("checkpoint.keep", keep)
    elif "checkpoint.every" in found.values:
        found.miss("save_total_limit", keep, "only the newest 2 stay; set checkpoint.keep for more")


def _watching(given: Given, found: Translation) -> None:
    reports = given.value("report_to") or []
    known = []
    for name in reports if isinstance(reports, list) else [reports]:
        if name in get_args(TrackerName):
            known.append(name)
        elif name not in ("none", "all"):
            found.miss("report_to", name, "give its Accelerate tracker to trilith.training.run")
    if known:
        found.set("watch.trackers", known)
    strategy = given.text("eval_strategy") or given.text("evaluation_strategy") or "no"
    every = given.number("eval_steps", least=0.0)
    if strategy != "no":
        what = every if every and strategy == "steps" else strategy
        found.miss("eval_strategy", what, "needs held-out tokens: set [evaluation] tokens and every")


def _defaults() -> dict[str, Any]:
    """Return what the installed transformers writes where nothing was asked for."""
    from transformers import TrainingArguments

    return {
        one.name: getattr(one.default, "value", one.default)
        if one.default is not dataclasses.MISSING
        else one.default_factory()
        if one.default_factory is not dataclasses.MISSING
        else None
        for one in dataclasses.fields(TrainingArguments)
    }
