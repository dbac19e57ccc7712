"""No setting of another trainer's configuration vanishes: it changes the recipe, or it is listed."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from trilith.recipes.foreign.from_deepspeed import from_deepspeed
from trilith.recipes.foreign.from_trainer import from_trainer
from trilith.recipes.foreign.translation import Translation

#: Every value another than DeepSpeed's default.
DEEPSPEED = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "steps_per_print": 20,
    "gradient_clipping": 0.5,
    "communication_data_type": "fp16",
    "optimizer": {
        "type": "Lamb",
        "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 3e-7, "amsgrad": True},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {
            "warmup_min_ratio": 0.1,
            "warmup_num_steps": 500,
            "total_num_steps": 10000,
            "cos_min_ratio": 0.2,
            "last_batch_iteration": 5,
        },
    },
    "fp16": {
        "enabled": True,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "min_loss_scale": 2,
        "initial_scale_power": 15,
        "consecutive_hysteresis": True,
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.3},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 7},
        "reduce_bucket_size": 5e8,
        "mics_shard_size": 2,
    },
    "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4},
    "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "mine"},
    "data_types": {"grad_accum_dtype": "fp32", "other": "x"},
    "tensor_parallel": {"tp": {"tp_size": 1, "tp_grain_size": 64}, "autotp_size": 1, "preset": "llama"},
    "progressive_layer_drop": {"enabled": True, "theta": 0.4},
}

#: Every value another than transformers' or TRL's default.
TRAINER = {
    "output_dir": "llama-sft",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 16,
    "max_steps": 2000,
    "learning_rate": 3e-5,
    "lr_scheduler_type": "cosine_warmup_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 3e-6, "warmup_lr_rate": 0.1},
    "warmup_ratio": 0.03,
    "optim": "adafactor",
    "weight_decay": 0.01,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-7,
    "max_grad_norm": 0.5,
    "label_smoothing_factor": 0.1,
    "bf16": True,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"every": 2},
    "logging_steps": 5,
    "save_steps": 0.1,
    "save_total_limit": 3,
    "seed": 7,
    "report_to": ["wandb", "tensorboard"],
    "eval_strategy": "steps",
    "eval_steps": 100,
    "max_length": 512,
    "packing": True,
    "assistant_only_loss": True,
    "parallelism_config": {"tp_size": 2, "cp_size": 2},
    "fsdp": True,
    "fsdp_config": {"reshard_after_forward": False, "cpu_offload": True, "state_dict_type": "SHARDED"},
}

Translate = Callable[[dict[str, Any]], Translation]
BOTH = [
    pytest.param(DEEPSPEED, lambda raw: from_deepspeed(raw, "ds.json"), id="deepspeed"),
    pytest.param(TRAINER, lambda raw: from_trainer(raw, "args.json", ranks=4), id="trainer"),
]
#: Settings that change nothing whether they are present or not, and why.
SAME = {
    ("train_micro_batch_size_per_gpu",): "follows from the other two",
    ("gradient_accumulation_steps",): "follows from the other two",
    ("zero_optimization", "offload_optimizer", "device"): "offload_param says it too",
    ("tensor_parallel", "tp", "tp_size"): "1 is the default",
    ("tensor_parallel", "autotp_size"): "1 is the default",
}


def leaves(raw, path=()):
    for key, value in raw.items():
        yield from leaves(value, (*path, key)) if isinstance(value, dict) else [(*path, key)]


def objects(raw, path=()):
    yield path
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from objects(value, (*path, key))


def at(raw, path):
    for key in path:
        raw = raw[key]
    return raw


def outcome(found):
    return found.values, found.missed


@pytest.mark.parametrize(("config", "translate"), BOTH)
def test_every_setting_changes_the_recipe_or_is_listed(config, translate):
    whole = outcome(translate(config))
    vanished = []
    for path in leaves(config):
        without = copy.deepcopy(config)
        del at(without, path[:-1])[path[-1]]
        if outcome(translate(without)) == whole and path not in SAME:
            vanished.append(".".join(path))
    assert not vanished


@pytest.mark.parametrize(("config", "translate"), BOTH)
def test_an_unknown_key_is_listed_wherever_it_stands(config, translate):
    for path in objects(config):
        odd = copy.deepcopy(config)
        at(odd, path)["unheard_of"] = 3
        missed = translate(odd).missed
        names = {line.split(" = ")[0] for line in missed}
        inside = {".".join((*path, "unheard_of")), *(".".join(path[:n]) for n in range(1, len(path) + 1))}
        assert names & inside, f"{'.'.join(path) or 'the top'}: {missed}"


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "rate", "lost"),
    [
        ({"lr": 3e-5}, {"type": "WarmupLR", "params": {}}, 1e-3, True),
        ({"lr": 3e-5}, {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}, 1e-3, True),
        ({"lr": 3e-5}, {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-4}}, 2e-4, True),
        ({"lr": 3e-5}, {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}, 3e-5, False),
        ({}, None, 1e-3, False),
        ({"lr": 3e-5}, None, 3e-5, False),
    ],
)
def test_the_rate_is_the_one_that_deepspeed_takes(optimizer, scheduler, rate, lost):
    raw = {"optimizer": {"type": "AdamW", "params": optimizer}, "train_batch_size": 8}
    found = from_deepspeed({**raw, **({"scheduler": scheduler} if scheduler else {})}, "ds.json")
    assert found.values["optimizer.lr"] == rate
    assert any(line.startswith("optimizer.params.lr = 3e-05: ") for line in found.missed) == lost
    said = [line for line in found.missed if line.startswith("scheduler.params.warmup_type")]
    assert bool(said) == (scheduler is not None), "a straight line, whatever the schedule after it"


def test_the_trainer_keeps_the_rate_of_deepspeed_s_scheduler(tmp_path):
    theirs = {"scheduler": {"type": "WarmupLR", "params": {}}, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(theirs))
    raw = {"output_dir": "x", "max_steps": 9, "learning_rate": 2e-5, "deepspeed": "ds.json"}
    found = from_trainer(raw, str(tmp_path / "args.json"), ranks=1)
    assert found.values["optimizer.lr"] == 1e-3
    assert any(line.startswith("learning_rate = 2e-05") for line in found.missed)


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({}, "layout.zero", 2),
        ({"fsdp_config": {"fsdp_reshard_after_forward": "true"}}, "layout.zero", 3),
        ({"fsdp_config": {"version": 1, "reshard_after_forward": "SHARD_GRAD_OP"}}, "layout.zero", 2),
        ({"fsdp": "shard_grad_op", "fsdp_config": {"reshard_after_forward": True}}, "layout.zero", 2),
        ({}, "optimizer.minimum_ratio", pytest.approx(0.1)),
        ({}, "optimizer.schedule", "cosine"),
        ({}, "data.samples", "packed"),
        ({"packing": False}, "data.samples", "single"),
        ({}, "memory.offload", True),
    ],
)
def test_what_the_trainer_says_of_fsdp_and_rows(changes, key, value):
    found = from_trainer({**TRAINER, **changes}, "args.json", ranks=4)
    assert found.values[key] == value
    if key == "data.samples":
        assert "tokenize --chat" in found.toml()
