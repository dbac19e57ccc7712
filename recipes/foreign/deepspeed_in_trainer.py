"""Translate a DeepSpeed configuration that Hugging Face's Trainer was given, and would complete."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...storage.small_files import read_json
from .from_deepspeed import from_deepspeed
from .translation import ForeignConfig, RecipeDraft


def deepspeed_file(config: ForeignConfig) -> tuple[Mapping[str, Any], str]:
    """Return DeepSpeed's configuration and its place: in this file, in one beside it, or at a named path."""
    setting = config.value("deepspeed")
    if isinstance(setting, dict):
        return setting, config.where
    beside = Path(config.where).parent / str(setting)
    file = beside if beside.exists() else Path(str(setting))
    return read_json(file), str(file)


def with_arguments(
    value: Mapping[str, Any], where: str, arguments: Mapping[str, Any], ranks: int | None
) -> RecipeDraft:
    """Translate a DeepSpeed configuration whose "auto" values come from TrainingArguments.

    It fills them in as transformers' ``HfTrainerDeepSpeedConfig`` does.
    """
    rate = arguments.get("learning_rate", 5e-5)
    autos = {
        "train_micro_batch_size_per_gpu": arguments.get("per_device_train_batch_size", 8),
        "gradient_accumulation_steps": arguments.get("gradient_accumulation_steps", 1),
        "train_batch_size": None,
        "gradient_clipping": arguments.get("max_grad_norm", 1.0),
        "optimizer.params.lr": rate,
        "optimizer.params.betas": [arguments.get("adam_beta1", 0.9), arguments.get("adam_beta2", 0.999)],
        "optimizer.params.eps": arguments.get("adam_epsilon", 1e-8),
        "optimizer.params.weight_decay": arguments.get("weight_decay", 0.0),
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_max_lr": rate,
        "scheduler.params.warmup_num_steps": None,
        "scheduler.params.total_num_steps": None,
        "fp16.enabled": bool(arguments.get("fp16")),
        "bf16.enabled": bool(arguments.get("bf16")),
    }
    draft = from_deepspeed(value, where, ranks=ranks, autos=autos)
    draft.missed = [line for line in draft.missed if not line.startswith("optimizer = null")]
    return draft
