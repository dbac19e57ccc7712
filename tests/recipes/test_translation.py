"""Configurations of DeepSpeed and of Hugging Face's Trainer as recipes that load, and what they lose said."""

import json
import tomllib

import pytest
from trilith.cli.app import run
from trilith.parallel_state import BadInput
from trilith.recipes import load_recipe
from trilith.recipes.foreign.from_deepspeed import from_deepspeed
from trilith.recipes.foreign.from_trainer import from_trainer

#: As in DeepSpeed's tutorials: ZeRO-3 with everything on the CPU, fp16, WarmupDecayLR.
ZERO3 = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "steps_per_print": 20,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": 3e-5,
            "warmup_num_steps": 500,
            "warmup_type": "linear",
            "total_num_steps": 10000,
        },
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 15,
    },
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False},
    "communication_data_type": "fp32",
    "wall_clock_breakdown": False,
    "progressive_layer_drop": {"enabled": True, "theta": 0.5},
}

#: As transformers' docs give it: everything that the Trainer knows is "auto".
AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2, "allgather_partitions": True, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}

TRAINER = {
    "output_dir": "llama-sft",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 16,
    "max_steps": 2000,
    "num_train_epochs": 3.0,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 2e-6},
    "warmup_ratio": 0.03,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.01,
    "adam_beta2": 0.95,
    "max_grad_norm": 0.0,
    "label_smoothing_factor": 0.1,
    "bf16": True,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "logging_steps": 5,
    "save_strategy": "steps",
    "save_steps": 0.1,
    "save_total_limit": 3,
    "seed": 7,
    "neftune_noise_alpha": 5.0,
    "torch_compile": True,
    "report_to": ["wandb", "comet_ml", "tensorboard"],
    "eval_strategy": "steps",
    "eval_steps": 100,
    "fsdp": "full_shard auto_wrap offload",
    "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "xla": False},
    "push_to_hub": False,
    "hub_token": "<HUB_TOKEN>",
}


def filled(tmp_path, toml):
    """Return the printed recipe with its blanks filled in, as its comments and the command's help say."""
    assert tomllib.loads(toml)
    path = tmp_path / "recipe.toml"
    path.write_text(toml)
    return load_recipe(
        path, ["model.init_from=model", "data.tokens=tokens", "data.sequence_length=512", "steps=10000"]
    )


def test_zero3_with_offload_and_fp16(tmp_path):
    found = from_deepspeed(ZERO3, "ds.json")
    assert set(found.blanks) == {"model.init_from", "data.tokens", "data.sequence_length"}
    recipe = filled(tmp_path, found.toml())
    assert recipe.steps == 10000 and recipe.log_every == 20 and recipe.device == "cuda"
    assert (recipe.compute, recipe.dtype, recipe.reduce) == ("float16", "float32", "float32")
    assert (recipe.loss_scale.initial, recipe.loss_scale.growth_interval) == (2.0**15, 500)
    assert (recipe.layout.data, recipe.layout.zero) == (8, 3)
    assert (recipe.data.global_batch, recipe.data.micro_batch) == (256, 4)
    assert recipe.memory.offload and recipe.memory.checkpointing == "full"
    wanted = recipe.optimizer
    assert (wanted.lr, wanted.betas, wanted.eps, wanted.weight_decay) == (3e-5, (0.8, 0.999), 1e-8, 3e-7)
    assert (wanted.schedule, wanted.warmup, wanted.minimum_ratio, wanted.clip) == ("linear", 500, 0, 0.5)
    lost = [line.split(" = ")[0] for line in found.missed]
    assert sorted(lost) == [
        "activation_checkpointing.partition_activations",
        "fp16.hysteresis",
        "progressive_layer_drop",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.overlap_comm",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ]
    assert all(f"# {line}" in found.toml() and line.count(": ") for line in found.missed)


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        pytest.param(
            {"fp16": {"enabled": True, "loss_scale": 128}}, "loss_scale.initial", 128.0, id="static"
        ),
        pytest.param({"bf16": {"enabled": True}}, "compute", "bfloat16", id="bf16"),
        pytest.param({}, "compute", None, id="fp32"),
        pytest.param({"gradient_clipping": None}, "optimizer.clip", 0.0, id="no-clipping"),
        pytest.param({"zero_optimization": {"stage": 1}}, "layout.zero", 1, id="stage"),
        pytest.param(
            {"zero_optimization": {"stage": 2, "cpu_offload": True}}, "memory.offload", True, id="old"
        ),
        pytest.param({"tensor_parallel": {"autotp_size": 2}}, "layout.tensor", 2, id="tensor"),
        pytest.param({"data_types": {"grad_accum_dtype": "fp32"}}, "reduce", "float32", id="accumulation"),
        pytest.param(
            {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "layout.data_replicate", 4, id="mics"
        ),
        pytest.param(
            {
                "scheduler": {
                    "type": "WarmupCosineLR",
                    "params": {"total_num_steps": 9, "warmup_num_steps": 2},
                }
            },
            "optimizer.minimum_ratio",
            1e-4,
            id="cosine",
        ),
    ],
)
def test_each_choice_of_deepspeed(changes, key, value):
    base = {name: one for name, one in ZERO3.items() if name not in ("fp16", "communication_data_type")}
    assert from_deepspeed({**base, **changes}, "ds.json").values.get(key) == value


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, 'optimizer.type = "Lamb"'),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, 'scheduler.type = "OneCycle"'),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, 'scheduler.params.warmup_type = "log"'),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload_param.device"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention"),
        ({"invented": {"enabled": True}}, "invented"),
        ({"gradient_clipping": "auto"}, 'gradient_clipping = "auto"'),
    ],
)
def test_what_deepspeed_loses_is_said(changes, lost):
    found = from_deepspeed({**ZERO3, **changes}, "ds.json")
    assert any(lost in line for line in found.missed), found.missed


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train_batch_size": 250}, r"train_batch_size: expected micro-batches of 4 x 8 steps x 7"),
        ({"bf16": {"enabled": True}}, r"fp16 or bf16"),
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage: expected 0, 1, 2 or 3, found 4"),
        ({"gradient_clipping": "much"}, r"gradient_clipping: expected a number"),
        ({"gradient_clipping": True}, r"gradient_clipping: expected a number"),
        ({"optimizer": "AdamW"}, r"optimizer: expected an object"),
        ({"train_micro_batch_size_per_gpu": 0.5}, r"train_micro_batch_size_per_gpu"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [2, 3]}}}, r"optimizer\.betas"),
    ],
)
def test_a_deepspeed_file_that_cannot_be_is_refused(changes, says):
    with pytest.raises(BadInput, match=says) as error:
        from_deepspeed({**ZERO3, **changes}, "ds.json")
    assert str(error.value).startswith("ds.json: ") and "\n" not in str(error.value)


def test_trainer_with_fsdp(tmp_path):
    found = from_trainer(TRAINER, "args.json", ranks=4)
    recipe = filled(tmp_path, found.toml().replace("# FILL IN: steps", ""))
    assert recipe.out == "llama-sft" and recipe.seed == 7 and recipe.compute == "bfloat16"
    assert (recipe.data.micro_batch, recipe.data.global_batch, recipe.layout.data) == (2, 128, 4)
    wanted = recipe.optimizer
    assert (wanted.schedule, wanted.minimum_ratio, wanted.warmup) == ("cosine", pytest.approx(0.1), 60)
    assert (wanted.lr, wanted.betas, wanted.weight_decay) == (2e-5, (0.9, 0.95), 0.01)
    assert (wanted.clip, wanted.label_smoothing) == (0.0, 0.1)
    assert recipe.layout.zero == 3 and recipe.memory.offload and recipe.memory.checkpointing == "full"
    assert (recipe.checkpoint.every, recipe.checkpoint.keep, recipe.log_every) == (200, 3, 5)
    assert found.values["steps"] == 2000
    lost = [line.split(" = ")[0] for line in found.missed]
    assert sorted(lost) == ["eval_strategy", "neftune_noise_alpha", "report_to", "torch_compile"]
    assert recipe.watch.trackers == ["wandb", "tensorboard"]


def test_what_transformers_itself_writes_maps_without_noise(tmp_path):
    from transformers import TrainingArguments

    written = TrainingArguments(output_dir="x", use_cpu=True, max_steps=50, report_to=[]).to_json_string()
    found = from_trainer(json.loads(written), "args.json", ranks=1)
    assert [line.split(" = ")[0] for line in found.missed] == ["save_total_limit"]
    recipe = filled(tmp_path, found.toml())
    assert (recipe.optimizer.schedule, recipe.optimizer.minimum_ratio) == ("linear", 0.0)
    assert (recipe.optimizer.lr, recipe.device, recipe.data.global_batch) == (5e-5, "cpu", 8)


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"lr_scheduler_type": "linear", "lr_scheduler_kwargs": None}, "optimizer.schedule", "linear"),
        ({"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {}}, "optimizer.warmup", 0),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {}}, "optimizer.minimum_ratio", 0.005),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 200, "decay_type": "1-sqrt"},
            },
            "optimizer.decay",
            200,
        ),
        ({"warmup_steps": 12}, "optimizer.warmup", 12),
        ({"warmup_ratio": None, "warmup_steps": 0.5}, "optimizer.warmup", 1000),
        ({"bf16": False, "fp16": True}, "compute", "float16"),
        ({"fsdp": "shard_grad_op"}, "layout.zero", 2),
        ({"max_length": 1024}, "data.sequence_length", 1024),
        ({"learning_rate": "2e-5"}, "optimizer.lr", 2e-5),
        ({"save_strategy": "no"}, "checkpoint.every", None),
    ],
)
def test_each_choice_of_the_trainer(changes, key, value):
    found = from_trainer({**TRAINER, **changes}, "args.json", ranks=4).values.get(key)
    assert found == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"max_steps": -1}, "num_train_epochs = 3.0"),
        ({"max_steps": -1}, "warmup_ratio = 0.03"),
        ({"optim": "paged_adamw_8bit"}, 'optim = "paged_adamw_8bit"'),
        ({"optim": "adafactor"}, 'optim = "adafactor"'),
        ({"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}}, "restarts"),
        ({"save_strategy": "epoch"}, "save_strategy"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
    ],
)
def test_what_the_trainer_loses_is_said(changes, lost):
    found = from_trainer({**TRAINER, **changes}, "args.json", ranks=4)
    assert any(lost in line for line in found.missed), found.missed


def test_a_deepspeed_file_that_the_trainer_names_has_its_autos_filled_in(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    arguments = {name: one for name, one in TRAINER.items() if not name.startswith("fsdp")}
    found = from_trainer({**arguments, "deepspeed": "ds.json"}, str(tmp_path / "args.json"), ranks=4)
    recipe = filled(tmp_path, found.toml())
    assert (recipe.layout.zero, recipe.layout.data, recipe.data.global_batch) == (2, 4, 128)
    assert (recipe.compute, recipe.optimizer.lr, recipe.optimizer.clip) == ("bfloat16", 2e-5, 0.0)
    assert (recipe.optimizer.schedule, recipe.optimizer.warmup) == ("constant", 60), "DeepSpeed's counts"
    assert not [line for line in found.missed if "auto" in line]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fp16": True}, r"fp16: expected fp16 or bf16"),
        ({"learning_rate": "fast"}, r"learning_rate: expected a number"),
        ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps"),
        ({"fsdp": "sharded"}, r"fsdp: expected words out of"),
        ({"deepspeed": "nowhere.json"}, r"nowhere\.json: expected a file"),
        ({"adam_beta2": 1.5}, r"optimizer\.betas"),
    ],
)
def test_trainer_arguments_that_cannot_be_are_refused(changes, says):
    with pytest.raises(BadInput, match=says) as error:
        from_trainer({**TRAINER, **changes}, "args.json", ranks=4)
    assert "\n" not in str(error.value)


def test_the_command_prints_a_recipe_and_says_on_stderr_what_it_lost(tmp_path, capfd):
    (tmp_path / "ds.json").write_text(json.dumps(ZERO3))
    assert run(["recipe", "from-deepspeed", str(tmp_path / "ds.json")]) == 0
    out, err = capfd.readouterr()
    assert filled(tmp_path, out).layout.zero == 3
    assert "not mapped: zero_optimization.overlap_comm = true: " in err
    assert "fill in: data.tokens: " in err
    (tmp_path / "args.json").write_text(json.dumps(TRAINER))
    written = tmp_path / "made.toml"
    words = ["recipe", "from-trainer", str(tmp_path / "args.json"), "--ranks", "8", "--out", str(written)]
    assert run(words) == 0 and not capfd.readouterr().out
    assert filled(tmp_path, written.read_text()).layout.data == 8
    assert run(words) == 2 and "expected a new file" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "expected valid JSON"),
        ("[1]", "expected a JSON object, found a list"),
        ('{"a": 1}', "expected a DeepSpeed configuration, found keys a"),
        ("{}", "found keys (none)"),
        (None, "expected a file"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, capfd, text, says):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    assert run(["recipe", "from-deepspeed", str(path)]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err
