"""Arguments of Megatron-LM become recipes that load; what is lost is listed, contradictions are refused.

The scripts in ``megatron/`` state the arguments of three public examples, written anew.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from trilith.cli.app import run
from trilith.data.token_writer import TokenWriter
from trilith.parallel_state import BadInput
from trilith.recipes import load_recipe
from trilith.recipes.foreign.from_megatron import from_megatron
from trilith.recipes.foreign.megatron_arguments import Arguments, read_arguments
from trilith.recipes.foreign.shell_script import ShellScript

SCRIPTS = Path(__file__).parent / "megatron"
TOKENIZER = Path(__file__).parents[1] / "data" / "foreign_tokens" / "tokenizer"
#: A small model, as Megatron stores its arguments.
SMALL = {
    **{
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 96,
        "vocab_size": 300,
    },
    **{
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "add_bias_linear": False,
    },
    **{"group_query_attention": True, "num_query_groups": 2, "untie_embeddings_and_output_weights": True},
    **{"attention_dropout": 0.0, "hidden_dropout": 0.0, "max_position_embeddings": 64, "seq_length": 64},
    **{
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_iters": 100,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "bf16": True,
    },
    **{
        "lr_decay_style": "cosine",
        "world_size": 4,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
    },
}


def translated(values, *, ranks=None):
    world = values.get("world_size")
    rest = {key: value for key, value in values.items() if key != "world_size"}
    return from_megatron(Arguments(rest, world, []), "args.json", ranks=ranks)


def recipe_of(found, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(found.toml())
    fill = {"data.tokens": "tokens", "model.config.vocab_size": 50257, "model.init_from": "model"}
    return load_recipe(path, [f"{key}={value}" for key, value in fill.items() if key in found.blanks])


def lost(found):
    return {line.split(" = ")[0] for line in found.missed}


def test_gpt3_of_175b(tmp_path):
    given = read_arguments(SCRIPTS / "gpt3.sh")
    with pytest.raises(
        BadInput, match=r"a multiple of tensor=8 x pipeline=16 x context=1, found 8\. .*--ranks"
    ):
        from_megatron(given, "gpt3.sh")
    found = from_megatron(given, "gpt3.sh", ranks=1024)
    recipe = recipe_of(found, tmp_path)
    layout = recipe.layout
    assert (layout.tensor, layout.pipeline, layout.data, layout.zero) == (8, 16, 8, 0)
    assert (recipe.compute, recipe.loss_scale.initial, recipe.steps, recipe.seed) == (
        "float16",
        2.0**32,
        500_000,
        1234,
    )
    assert recipe.data.global_batch == 1536 and recipe.checkpoint.every == 10_000 and recipe.log_every == 100
    fields = recipe.model.config
    assert isinstance(fields, dict)
    assert (fields["model_type"], fields["n_layer"], fields["n_embd"], fields["attn_pdrop"]) == (
        "gpt2",
        96,
        12288,
        0.1,
    )
    wanted = recipe.optimizer
    assert (wanted.lr, wanted.betas, wanted.weight_decay, wanted.clip) == (6e-5, (0.9, 0.95), 0.1, 1.0)
    assert (wanted.schedule, wanted.warmup) == ("cosine", 430) and wanted.minimum_ratio == pytest.approx(0.1)
    assert (
        set(found.blanks) == {"data.tokens", "model.config.vocab_size"}
        and "$3" in found.blanks["data.tokens"]
    )
    assert {"rampup_batch_size", "lr_decay_iters", "hysteresis", "split", "vocab_file"} <= lost(found)


def test_llama_3_in_float8(tmp_path):
    found = from_megatron(read_arguments(SCRIPTS / "llama3.sh"), "llama3.sh")
    recipe = recipe_of(found, tmp_path)
    assert (recipe.compute, recipe.reduce, recipe.out) == ("float8", "bfloat16", "checkpoints/llama3_8b_fp8")
    assert (recipe.layout.world, recipe.layout.zero, recipe.steps) == (8, 1, 1_953_125_000 // 128)
    assert recipe.optimizer.warmup == 3_906_252 // 128
    fields = recipe.model.config
    # That example leaves --normalization at LayerNorm, so its model is no Llama.
    assert isinstance(fields, dict) and fields["model_type"] == "stablelm"
    assert (fields["vocab_size"], fields["num_key_value_heads"], fields["rope_theta"]) == (128256, 8, 1e6)
    assert any("counts as false" in line for line in found.missed)
    assert {"decoupled_lr", "fp8_recipe", "fp8_amax_history_len", "mock_data", "overlap_grad_reduce"} <= lost(
        found
    )


def test_mixtral_with_a_blend(tmp_path):
    found = from_megatron(read_arguments(SCRIPTS / "mixtral.sh"), "mixtral.sh")
    recipe = recipe_of(found, tmp_path)
    layout = recipe.layout
    assert (layout.pipeline, layout.virtual_stages, layout.data, layout.expert, layout.zero) == (
        4,
        2,
        16,
        8,
        1,
    )
    assert recipe.pipeline_schedule == "interleaved"
    assert recipe.data.tokens == ["data/wiki_text_document", "data/code_text_document"]
    assert recipe.data.weights == [0.3, 0.7] and recipe.model.tokenizer == "models/mixtral-8x7b"
    assert (recipe.model.size, recipe.model.config) == ("mixtral-8x7b", {"initializer_range": 0.01})
    # Megatron adds up the losses of 32 routers and divides by 2; here they are a mean that is not divided.
    assert recipe.experts is not None and recipe.experts.balance == pytest.approx(0.01 * 32 / 2)
    assert "moe_grouped_gemm" in lost(found) and not found.blanks


@pytest.mark.parametrize("name", ["gpt3", "llama3", "mixtral", "small"])
def test_every_recipe_passes_a_dry_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = SCRIPTS / f"{name}.sh"
    if name == "small":
        source = tmp_path / "args.json"
        source.write_text(json.dumps({"args": SMALL}))
    with TokenWriter("tokens", vocab_size=300) as writer:
        writer.add(np.arange(20_000) % 300)
        writer.commit()
    ranks = ["--ranks", "1024"] if name == "gpt3" else []
    assert run(["recipe", "from-megatron", str(source), "--out", "recipe.toml", *ranks]) == 0
    fill = ["data.tokens=tokens", *(["model.config.vocab_size=50257"] if name == "gpt3" else [])]
    fill += ["data.weights=[1]", f"model.tokenizer={TOKENIZER}"] if name == "mixtral" else []
    assert run(["train", "recipe.toml", "--dry-run", *fill]) == 0


def words_of_bash(script, positional, tmp_path):
    """Run the script in bash with a `torchrun` that prints its words."""
    stub = tmp_path / "torchrun"
    stub.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    stub.chmod(0o755)
    (tmp_path / "pretrain_gpt.py").touch()
    done = subprocess.run(
        ["bash", str(script), *positional],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["gpt3", "llama3", "mixtral"])
def test_the_words_of_a_script_are_those_of_bash(name, tmp_path):
    positional = ["$1", "$2", "$3"] if name == "gpt3" else []
    read = ShellScript((SCRIPTS / f"{name}.sh").read_text(), name)
    (words,) = [words for words in read.commands if words[0] == "torchrun"]
    assert words[1:] == words_of_bash(SCRIPTS / f"{name}.sh", positional, tmp_path)


@pytest.mark.parametrize(
    "script",
    [
        'A="x  y"; torchrun $A "$A" \'$A\' "${A}z" $A"q"',
        'A=(1 \'2 3\'); A+=(4); torchrun ${A[@]} "${A[@]}" "x${A[@]}y" "${A[*]}"',
        'A=1\nA+=2\nB=${A:-7}\nC=${NO:-8}\nD=${NO:-"a b"}\ntorchrun $A $B $C $D ${NO:+n} ${A:+s}',
        "N=4; torchrun $((N*2+1)) $(( (N + 2) / 3 )) $((N%3)) $(($N-1))",
        "torchrun a#b \\\n  b # c\n",
        "A=() \nif [[ 1 == 1 ]]; then A+=(y); else A+=(n); fi; torchrun ${A[@]} end",
        'X=b\nif [ "$X" = a ]; then Y=1\nelif [ "$X" == b ] && [ 2 -gt 1 ]\n'
        "then Y=2\nelse Y=3\nfi\ntorchrun $Y",
        "X=4\nif [[ $X -ge 5 ]] || [[ ! $X -eq 3 ]]; then torchrun yes; else torchrun no; fi",
        "[ 1 -eq 2 ] && A=1\n[ 1 -eq 1 ] && B=2 || B=3\ntorchrun x$A y$B",
        "cat <<EOF > /dev/null\ntorchrun not this --num-layers\nEOF\ntorchrun this",
        'OPTIONS=" \\\n --a 1 \\\n --b 2"\ntorchrun $OPTIONS \'\' "" x',
        "export A=1 B=2; declare -r C=3; D=4 torchrun $A $B $C",
        'torchrun "a \\"b\\" \\$HOME" a\\ b \'it\'"\'"\'s\' --x="1 2"',
        "echo a | cat > /dev/null; mkdir -p x && torchrun --a; true || torchrun --b",
        "A='--x 1'\nA+=' --y 2'\ntorchrun ${A} \"${A}\"",
    ],
)
def test_what_a_shell_makes_of_words_is_what_bash_makes(script, tmp_path):
    path = tmp_path / "script.sh"
    path.write_text(script.replace("${NO:+n}", ""))
    read = ShellScript(path.read_text(), "script.sh")
    found = [
        word
        for words in read.commands
        if "torchrun" in words
        for word in words[words.index("torchrun") + 1 :]
    ]
    # What nobody has said is nothing in bash, and stays as it is here.
    assert [word.replace("$A", "") if word == "x$A" else word for word in found] == words_of_bash(
        path, [], tmp_path
    )


def test_no_command_of_a_script_is_run(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(
        "touch made\nTP=$(touch made; echo 2)\nPP=`touch made`\n"
        "for i in 1 2; do python other.py --num-layers 3; done\n"
        "python pretrain.py --num-layers 2 --tensor-model-parallel-size $TP --lr $LR --seed 1 --seed 2\n"
    )
    found = read_arguments(path)
    assert not (tmp_path / "made").exists()
    assert found.values == {"num_layers": "2", "seed": "2"} and found.ranks is None
    unsure = " | ".join(found.unsure)
    assert "tensor_model_parallel_size = $(touch made; echo 2)" in unsure and "lr = $LR" in unsure
    assert "seed = 1: said again" in unsure and "a loop" in unsure


def test_a_script_stored_arguments_and_yaml_make_the_same_recipe(tmp_path):
    flags = [
        f"--{key.replace('_', '-')} {value}" for key, value in SMALL.items() if not isinstance(value, bool)
    ]
    flags += [f"--{key.replace('_', '-')}" for key, value in SMALL.items() if value is True]
    command = f"torchrun --nproc_per_node=4 pretrain_gpt.py {' '.join(flags)} --disable-bias-linear"
    (tmp_path / "a.sh").write_text(command.replace("--world-size 4", ""))
    (tmp_path / "a.json").write_text(json.dumps(SMALL))
    batch = {key: SMALL[key] for key in ("micro_batch_size", "global_batch_size")}
    model = {
        key: value for key, value in SMALL.items() if key not in (*batch, "train_iters", "world_size", "bf16")
    }
    content = {
        "model": {**model, **batch},
        "trainer": {"max_steps": 100, "precision": "bf16-mixed", "devices": 4},
    }
    (tmp_path / "a.yaml").write_text(json.dumps(content))  # JSON is YAML
    made = [
        from_megatron(read_arguments(tmp_path / f"a.{end}"), "it").values for end in ("sh", "json", "yaml")
    ]
    assert made[0] == made[1] == made[2]
    assert (made[0]["layout.data"], made[0]["layout.sequence"], made[0]["compute"]) == (2, True, "bfloat16")
    assert made[0]["model.config.model_type"] == "llama"


#: One argument changed or added, and the key of the recipe that says it, with its value.
MAPPED = [
    (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        "layout.virtual_stages",
        2,
    ),
    ({"context_parallel_size": 2}, "layout.context", 2),
    ({"use_distributed_optimizer": True}, "layout.zero", 1),
    ({"use_torch_fsdp2": True}, "layout.zero", 3),
    ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}, "layout.zero", 2),
    (
        {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
        "layout.data_replicate",
        2,
    ),
    ({"optimizer_cpu_offload": True, "use_distributed_optimizer": True}, "memory.offload", True),
    ({"train_iters": None, "train_samples": 800}, "steps", 100),
    ({"train_samples": 801}, "steps", 100),
    ({"lr_decay_iters": 120}, "steps", 120),
    ({"lr_decay_iters": 120}, "stop_after", 100),
    ({"lr_warmup_iters": 7}, "optimizer.warmup", 7),
    ({"lr_warmup_fraction": 0.05}, "optimizer.warmup", 5),
    ({"lr_decay_style": "inverse-square-root"}, "optimizer.schedule", "inverse_sqrt"),
    ({"lr_decay_style": "constant"}, "optimizer.schedule", "constant"),
    ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9}, "optimizer.decay", 9),
    ({"lr_decay_style": "WSD", "lr_wsd_decay_style": "minus_sqrt"}, "optimizer.decay_shape", "1-sqrt"),
    ({"min_lr": 5e-4}, "optimizer.minimum_ratio", 0.5),
    ({"adam_beta2": 0.98}, "optimizer.betas", [0.9, 0.98]),
    ({"adam_eps": 1e-6}, "optimizer.eps", 1e-6),
    ({"weight_decay": 0.3}, "optimizer.weight_decay", 0.3),
    ({"clip_grad": 0.5}, "optimizer.clip", 0.5),
    ({"seed": 7}, "seed", 7),
    ({"recompute_granularity": "full", "recompute_method": "uniform"}, "memory.checkpointing", "full"),
    ({"recompute_activations": True}, "memory.checkpointing", "selective"),
    ({"grad_reduce_in_bf16": True}, "reduce", "bfloat16"),
    ({"bf16": False}, "compute", None),
    ({"bf16": False, "fp16": True, "loss_scale": 1024}, "loss_scale.initial", 1024.0),
    ({"fp8": "hybrid"}, "compute", "float8"),
    ({"save": "out", "save_interval": 50}, "checkpoint.every", 50),
    ({"save": "out"}, "out", "out"),
    ({"async_save": True}, "checkpoint.background", True),
    ({"log_interval": 3}, "log_every", 3),
    ({"tensorboard_dir": "logs"}, "watch.trackers", ["tensorboard"]),
    ({"data_path": ["a"]}, "data.tokens", "a"),
    ({"data_path": ["3", "a", "1", "b"]}, "data.weights", [3.0, 1.0]),
    ({"train_data_path": ["a"], "valid_data_path": ["b"]}, "evaluation.tokens", ["b"]),
    ({"reset_position_ids": True, "reset_attention_mask": True}, "data.documents", "separate"),
    ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "t"}, "model.tokenizer", "t"),
    ({"qk_layernorm": True}, "model.config.model_type", "qwen3"),
    ({"add_qkv_bias": True}, "model.config.model_type", "qwen2"),
    ({"normalization": "LayerNorm"}, "model.config.model_type", "stablelm"),
    (
        {"normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True},
        "model.config.model_type",
        "starcoder2",
    ),
    ({"num_experts": 4, "moe_aux_loss_coeff": 0.01}, "experts.balance", 0.02),
    (
        {"num_experts": 4, "qk_layernorm": True, "moe_ffn_hidden_size": 32},
        "model.config.moe_intermediate_size",
        32,
    ),
    ({"num_experts": 4, "expert_model_parallel_size": 2}, "layout.expert", 2),
    ({"kv_channels": 32}, "model.config.head_dim", 32),
    ({"use_rope_scaling": True}, "model.config.rope_scaling", None),
    ({"rotary_base": 500000}, "model.config.rope_theta", 500000.0),
    (
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
        "layout.virtual_stages",
        2,
    ),
]


@pytest.mark.parametrize(("changes", "key", "expected"), MAPPED, ids=lambda value: str(value)[:50])
def test_an_argument_becomes_its_key(changes, key, expected, tmp_path):
    path = tmp_path / "args.json"
    path.write_text(json.dumps({key: value for key, value in (SMALL | changes).items() if value is not None}))
    found = from_megatron(read_arguments(path), "args.json").values.get(key)
    if key.endswith("rope_scaling"):
        assert found["rope_type"] == "llama3" and found["factor"] == 8.0
    else:
        assert found == expected


@pytest.mark.parametrize("name", ["gpt3", "llama3", "mixtral"])
def test_no_argument_vanishes(name):
    given, ranks = read_arguments(SCRIPTS / f"{name}.sh"), 1024 if name == "gpt3" else None

    def outcome(values):
        try:
            return from_megatron(Arguments(values, given.ranks, []), "x", ranks=ranks).toml()
        except BadInput as error:
            return str(error)

    whole = outcome(dict(given.values))
    #: The same with and without: Megatron's own defaults, and what another argument says.
    default = {
        *(
            "attention_backend",
            "adam_beta1",
            "clip_grad",
            "tensor_model_parallel_size",
            "context_parallel_size",
        ),
        *(
            "kv_channels",
            "rotary_percent",
            "lr_decay_iters",
            "load",
            "tokenizer_type",
            "max_position_embeddings",
        ),
        *("moe_router_topk", "sequence_parallel", "apply_layernorm_1p", "use_mcore_models", "bf16", "save"),
        *("add_position_embedding", "vocab_size", "moe_router_load_balancing_type"),
    }
    silent = {
        key for key in given.values if outcome({k: v for k, v in given.values.items() if k != key}) == whole
    }
    assert silent <= default, silent - default


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fp16": True}, "fp16: expected fp16 or bf16, found .both."),
        ({"fp8": "e4m3", "bf16": False, "fp16": True}, "fp8: expected bf16 beside it"),
        (
            {"train_samples": 700},
            "train_samples: expected train_iters=100 x 8 rows, or one of them, found 700",
        ),
        ({"lr_decay_samples": 800}, "lr_decay_samples: expected lr_decay_iters beside train_iters"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3}, "lr_warmup_fraction: expected this or a number"),
        ({"lr_decay_style": "steps"}, "lr_decay_style: expected constant or linear"),
        ({"min_lr": 1.0}, "min_lr: expected at most lr=0.001"),
        (
            {"global_batch_size": 9},
            "global_batch_size: expected a multiple of micro_batch_size=2 x 2 data ranks",
        ),
        ({"world_size": 3}, "ranks: expected a multiple of tensor=2"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "pipeline_model_parallel_size: expected at least 2"),
        (
            {"num_layers_per_virtual_pipeline_stage": 2, "num_virtual_stages_per_pipeline_rank": 3},
            "num_virtual_stages_per_pipeline_rank: expected 2, with 2 blocks a stage, found 3",
        ),
        (
            {"num_layers_per_virtual_pipeline_stage": 3},
            "num_layers_per_virtual_pipeline_stage: expected a divisor",
        ),
        ({"use_torch_fsdp2": True, "use_megatron_fsdp": True}, "one of use_torch_fsdp2"),
        ({"data_parallel_sharding_strategy": "x"}, "data_parallel_sharding_strategy: expected no_shard"),
        ({"recompute_granularity": "some"}, "recompute_granularity: expected full or selective"),
        ({"num_attention_heads": 5}, "hidden_size: expected a multiple of 5 heads"),
        ({"tensor_model_parallel_size": "two"}, "tensor_model_parallel_size: expected a number"),
        ({"micro_batch_size": 0}, "micro_batch_size: expected a number of at least 1"),
        ({"data_path": ["1", "a", "b", "c"]}, "expected a weight before c, found b"),
        ({"data_path": ["0", "a", "1", "b"]}, "data path: expected finite weights above 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_contradictions_are_refused(changes, said):
    with pytest.raises(BadInput, match=said) as refused:
        translated(SMALL | changes)
    assert "\n" not in str(refused.value)


def test_a_model_that_no_family_is_stays_to_be_filled_in():
    for changes in ({"multi_latent_attention": True}, {"squared_relu": True}, {"rotary_percent": 0.5}):
        found = translated(SMALL | changes)
        assert "model.init_from" in found.blanks and "the model" in lost(found)
    lengths = ("seq_length", "max_position_embeddings")
    found = translated({key: value for key, value in SMALL.items() if key not in lengths})
    assert "model.init_from" in found.blanks and "max_position_embeddings" in lost(found)


def test_weights_of_held_out_data_are_listed():
    found = translated(SMALL | {"train_data_path": ["a"], "valid_data_path": ["1", "b", "3", "c"]})
    assert found.values["evaluation.tokens"] == ["b", "c"] and "valid_data_path" in lost(found)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.sh", "echo nothing", "a command with a .py file and arguments after it"),
        ("a.sh", "A='unended\npython x.py --a 1", "an end of what begins with '"),
        ("a.sh", "A=(1 2\npython x.py --num-layers 1", "a \\) for each array"),
        ("a.sh", "cat <<EOF\nx", "a line EOF"),
        (
            "a.sh",
            "A=xxxxxxxx\n" + "A=$A$A\n" * 40 + "python x.py --num-layers $A",
            "at most .* (words|characters)",
        ),
        ("a.sh", "A=(1 2)\n" + "A+=(${A[@]})\n" * 40 + "python x.py --num-layers 1", "at most .* words"),
        ("a.sh", "#" * 2**18, "at most 131,072 bytes"),
        ("a.sh", "python x.py --unknown 1", "expected arguments of Megatron-LM, found arguments unknown"),
        ("a.yaml", "- 1", "a mapping of arguments"),
        ("a.yaml", "a: [", "expected YAML"),
        ("a.yaml", "a: !!python/object/apply:os.system ['touch made']", "expected YAML"),
        ("a.yaml", "m: {lr: 1}\nn: {lr: 2}", "lr: expected one value, 1"),
        (
            "a.yaml",
            "a: &a {x: 1, y: 2}\n"
            + "".join(
                f"{c}: &{c} {{p: *{b}, q: *{b}}}\n"
                for b, c in zip("abcdefghijklmnopqrstu", "bcdefghijklmnopqrstuv", strict=True)
            ),
            "values and no aliases, found an alias of line",
        ),
        ("a.yaml", "a: " + "[" * 1000, "expected YAML"),
        ("a.yaml", "lr: 1\nlr: 2", "lr: expected each key once"),
        ("a.json", "[1]", "object"),
        ("a.txt", "x", "a script"),
    ],
)
def test_files_that_are_no_arguments_are_refused_in_a_moment(name, content, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    with pytest.raises(BadInput, match=said) as refused:
        from_megatron(read_arguments(Path(name)), name)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]
