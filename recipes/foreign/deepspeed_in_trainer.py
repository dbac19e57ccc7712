"""Translate a DeepSpeed configuration that Hugging Face's Trainer was given, and would complete."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...storage.small_files import read_json
from .from_deepspeed import from_deepspeed
from .translation import Given, Translation


def deepspeed_file(given: Given) -> tuple[Mapping[str, Any], str]:
    """Return DeepSpeed's configuration and its place: in this file, in one beside it, or at a named path."""
    value = given.value("deepspeed")
    if isinstance(value, dict):
        return value, given.where
    beside = Path(given.where).parent / str(value)
    file = beside if beside.exists() else Path(str(value))
    return read_json(file), str(file)


def with_arguments(
    value: Mapping[str, Any], where: str, arguments: Mapping[str, Any], ranks: int | None
) -> Translation:
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
    found = from_deepspeed(value, where, ranks=ranks, autos=autos)
    found.missed = [line for line in found.missed if not line.startswith("optimizer = null")]
    return found
