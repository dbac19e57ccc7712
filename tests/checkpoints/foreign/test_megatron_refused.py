"""Checkpoints of Megatron that are not of the model, or cannot be understood, are refused with the reason."""

import os
import shutil
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from megatron_by_hand import (
    BRIDGE,
    config_of,
    shared_dicts,
    unpacked,
    whole,
    write_dist,
    write_legacy,
    write_stages,
)
from megatron_models import MODELS
from support.damage import flip_bit
from support.refusals import Refused, refusals
from trilith.checkpoints import convert, read_source
from trilith.parallel_state import BadCheckpoint

LLAMA = MODELS["llama"]
STEP = "iter_0000003"
EMBEDDING = {"embedding.word_embeddings.weight": torch.zeros(32, 16)}


def read(folder):
    return read_source(folder / STEP, config=folder / "config")


def other_args(**changed):
    return Namespace(**vars(LLAMA.args) | changed)


def dist(weights=EMBEDDING, args=LLAMA.args, write=lambda step: None, moments=None, of=LLAMA, **config):
    """Return what writes Megatron's distributed form, perhaps with moments, and a config beside it."""

    def give(folder):
        config_of(of, folder, **config)
        states = dict.fromkeys(("exp_avg", "exp_avg_sq"), moments or {})
        write(write_dist(folder / STEP, weights, args=args, states=states))

    return give


def legacy(write=lambda step: None, ranks=1, of=LLAMA, **entries):
    """Return what writes Megatron's first form, with other entries in each file."""

    def give(folder):
        config_of(of, folder)
        write(write_legacy(folder / STEP, of, ranks, **entries))

    return give


def of_experts(**changed):
    """Return what unpacks Qwen2-MoE beside a config that differs."""

    def give(folder):
        unpacked("qwen2_moe", folder)
        config_of(MODELS["qwen2_moe"], folder, **changed)

    return give


class Calls:
    def __reduce__(self):
        return os.system, ("touch called",)


def edited(rank, change):
    def write(step):
        path = step / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)

    return write


def stages(folder):
    config_of(LLAMA, folder)
    write_stages(folder / STEP, LLAMA)


def exchanged(write):
    """Return what writes two ranks, and states in each file the number of the other."""

    def give(folder):
        write(folder)
        for number, path in enumerate(sorted((folder / STEP).glob("mp_rank_*/*.pt"))):
            state = torch.load(path, weights_only=False)
            state["args"].rank = 1 - number
            torch.save(state, path)

    return give


def copied_rank(step):
    shutil.copytree(step / "mp_rank_00", step / "mp_rank_01", dirs_exist_ok=True)


def without_a_layer(state):
    encoder = state["model"]["language_model"]["encoder"]
    for name in [name for name in encoder if "layers.3." in name]:
        del encoder[name]


def newest_of_a_run(text):
    def give(folder):
        dist()(folder)
        (folder / "latest_checkpointed_iteration.txt").write_text(text)

    return give


def as_doubles(state):
    head = state["model"]["language_model"]["output_layer"]
    head["weight"] = head["weight"].double()


def bridge(text):
    return dist(args=None, write=lambda step: (step / "run_config.yaml").write_text(text))


ARGUMENTS = [
    ("num_layers", 5, "num_hidden_layers"), ("hidden_size", 32, "hidden_size"),
    ("num_attention_heads", 8, "num_attention_heads"), ("num_query_groups", 4, "num_key_value_heads"),
    ("kv_channels", 8, "head_dim"), ("ffn_hidden_size", 48, "intermediate_size"),
    ("padded_vocab_size", 64, "vocab_size"), ("rotary_base", 500000, "rope_theta"),
    ("rotary_percent", 0.5, "rotary_dim"), ("use_rope_scaling", True, "rope_scaling"),
    ("norm_epsilon", 1e-6, "rms_norm_eps"), ("swiglu", False, "hidden_act"),
    ("untie_embeddings_and_output_weights", False, "tie_word_embeddings"),
    ("window_size", (7, 0), "sliding_window"),
]  # fmt: skip
EXPERTS = [
    ("num_experts", 8, "num_experts"), ("num_experts_per_tok", 3, "moe_router_topk"),
    ("norm_topk_prob", True, "moe_router_pre_softmax"), ("moe_intermediate_size", 16, "moe_ffn_hidden_size"),
    ("shared_expert_intermediate_size", 16, "moe_shared_expert_intermediate_size"),
]  # fmt: skip
MEANINGS = {
    **dict.fromkeys(("rotary_interleaved", "num_layers", "multi_latent_attention"), shared_dicts(100, 6)),
    "apply_layernorm_1p": True, "position_embedding_type": "none", "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "sinkhorn", "moe_router_topk_scaling_factor": 2.5,
    "softmax_type": "off-by-one", "no_rope_freq": [1, 0],
}  # fmt: skip
GRANITE = {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "embedding_multiplier": 12.0}
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LAYER, DIGITS = "decoder.layers.0", "9" * 400
#: Of one layer and two experts, and what each file of a rank may hold in place of the model.
SMALL = replace(
    LLAMA, args=other_args(num_experts=2, num_layers=1), config=LLAMA.config | {"num_hidden_layers": 1}
)
NO_MODELS = {
    "shared dicts": (shared_dicts(50, 8), "model: expected tensors"),
    "digits": ({f"decoder.layers.{DIGITS}.mlp.linear_fc2.weight": torch.zeros(2, 2)}, "expected 1, as args"),
    "one dim": ({f"{LAYER}.mlp.linear_fc2.weight": torch.zeros(2)}, "expected 2 dims"),
    "no dim": ({f"{LAYER}.x": torch.zeros(2), "output_layer.weight": torch.zeros(())}, "expected 2 dims"),
    "expert": ({f"{LAYER}.mlp.experts.local_experts.0.linear_fc1.weight": torch.zeros(2)}, "expected 2 dims"),
    "grouped": ({f"{LAYER}.mlp.experts.weight1": torch.zeros(3, 5)}, "2 experts of hidden size 16"),
}  # fmt: skip
test_checkpoints_of_megatron_that_cannot_be_used_are_refused = refusals(
    *(Refused(f"args-{argument}", read, rf"{key}: .*args\.{argument} in .*common\.pt",
              given=dist(args=other_args(**{argument: changed}))) for argument, changed, key in ARGUMENTS),
    Refused("factor-llama3", read, r"rope_scaling: expected llama3 32.*, .*found .*8\.0",
            given=dist(args=other_args(use_rope_scaling=True, rope_scaling_factor=32), rope_scaling=LLAMA_3)),
    Refused("frequencies-llama3", read, r"rope_scaling: expected llama3 8\.0 1\.0 4\.0 8192, .*found .*2\.0",
            given=dist(args=other_args(use_rope_scaling=True),
                       rope_scaling=LLAMA_3 | {"low_freq_factor": 2.0})),
    Refused("factor-linear", read, r"rope_scaling: expected linear 4, .*found .*8\.0",
            given=dist(args=other_args(rotary_seq_len_interpolation_factor=4),
                       rope_scaling={"rope_type": "linear", "factor": 8.0})),
    *(Refused(f"experts-{key}", read, rf"args\.{argument}", given=of_experts(**{key: changed}))
      for key, changed, argument in EXPERTS),
    # Weights that mean something else.
    *(Refused(argument, read, argument, given=dist(args=other_args(**{argument: value})))
      for argument, value in MEANINGS.items()),
    Refused("no tensor rank", read, r"args\.tensor_model_parallel_size: expected a number above 0, found 0",
            given=legacy(args=other_args(tensor_model_parallel_size=0))),
    Refused("scales that Megatron lacks", read, "embed_tokens", given=dist(whole(LLAMA), **GRANITE)),
    Refused("another backend", read, "--ckpt-format torch_dist", given=dist(
        write=lambda step: (step / "metadata.json").write_text('{"sharded_backend": "zarr"}'))),
    *(Refused(f"no {name}", read, rf"{name}: expected a file, found nothing there\. Copy the file here",
              given=dist(write=lambda step, name=name: (step / name).unlink()))
      for name in ("metadata.json", "common.pt")),
    Refused("more layers than a model has", read, "at most 65,536 layers",
            given=dist({"decoder.layers.mlp.linear_fc2.weight": torch.zeros((1 << 16) + 1, 1)})),
    Refused("the newest step is not there", lambda folder: read_source(folder, config=folder / "config"),
            r"latest_checkpointed.*found iter_0000009, which is not there", given=newest_of_a_run("9\n")),
    Refused("no newest step", lambda folder: read_source(folder, config=folder / "config"),
            r"latest_checkpointed.*: expected the number of a step, or release, found '\?'",
            given=newest_of_a_run("?")),
    *(Refused(name, read, rf"hidden_act: expected {activation}, as args\.{name} in .*common\.pt",
              given=dist(args=other_args(swiglu=False, **{name: True})))
      for name, activation in (("squared_relu", "relu2"), ("quick_geglu", "quick_gelu"))),
    Refused("a weight that Mixtral norms", read, r"norm_topk_prob: expected false, .*router_pre_softmax",
            given=dist(of=MODELS["mixtral"], num_experts_per_tok=1, args=Namespace(
                **vars(MODELS["mixtral"].args) | {"moe_router_topk": 1, "moe_router_pre_softmax": True}))),
    Refused("a list for what is common", read, r"common\.pt: expected a dict, found list",
            given=dist(write=lambda step: torch.save([1], step / "common.pt"))),
    Refused("moments of another model", read, r"exp_avg of 'x': expected a weight of that name, found none",
            given=dist(moments={"x": torch.zeros(2)})),
    Refused("moments of another shape", read, r"exp_avg of '.*': expected \[32, 16\], found \[5\]",
            given=dist(moments=dict.fromkeys(EMBEDDING, torch.zeros(5)))),
    Refused("a list for a rank", read, r"mp_rank_00/model_optim_rng\.pt: expected a dict, found list",
            given=legacy(lambda step: torch.save([1], step / "mp_rank_00" / "model_optim_rng.pt"))),
    Refused("ranks of two dtypes", read, r"output_layer\.weight: expected tensors of one kind on all ranks, "
            "found F32 of 2 dims and F64 of 2 dims", given=legacy(edited(1, as_doubles), ranks=2)),
    Refused("a rank without a layer", read, r"mp_rank_01.*: layers: expected 0 to 3, found '?\[0, 1, 2\]",
            given=legacy(edited(1, without_a_layer), ranks=2)),
    Refused("a file of Megatron Bridge", read, r"key_value_heads: .*num_query_groups in .*run_config\.yaml",
            given=bridge(BRIDGE.format(groups=4))),
    Refused("another activation of Bridge's", read, r"hidden_act: expected one of gelu, .*found silu",
            given=bridge(BRIDGE.format(groups=2).replace("silu", "gelu"))),
    *(Refused(f"YAML {text}", read, "YAML", given=bridge(text))
      for text in ("model: [", "a: &a {b: 1}\nmodel:\n  <<: [*a, *a]\n")),
    Refused("YAML of something else", read, r"missing", given=bridge("a: 1\n")),
    Refused("a pickle that would call something", read, r"posix\.system", given=legacy(extra=Calls())),
    Refused("a missing rank", read, r"mp_rank_01: .*2 tensor ranks",
            given=legacy(lambda step: shutil.rmtree(step / "mp_rank_01"), ranks=2)),
    *(Refused(f"exchanged {axis}", read, r"mp_rank_0.*args\.rank: expected a rank at mp_rank_0.*exchanged",
              given=exchanged(write)) for axis, write in (("parts", legacy(ranks=2)), ("stages", stages))),
    Refused("ranks of two steps", read, r"mp_rank_01.*iteration: expected 3, found 4.*not of one checkpoint",
            given=legacy(edited(1, lambda state: state.update(iteration=4)), ranks=2)),
    Refused("a rank without a model", read, "expected as many models in every rank's file, found 1, 0",
            given=legacy(edited(1, lambda state: state.pop("model")), ranks=2)),
    Refused("version 1", read, r"checkpoint_version: .*2\.0 or later", given=legacy(checkpoint_version=1.0)),
    Refused("no version", read, r"checkpoint_version: expected 2\.0 or later, found 0",
            given=legacy(edited(0, lambda state: state.pop("checkpoint_version")))),
    Refused("a copied rank", read, r"mp_rank_01/.*: expected its rank's part .*found a copy of .*mp_rank_00/",
            given=legacy(copied_rank, ranks=2)),
    Refused("no arguments", read, "args: .*arguments", given=legacy(args=None)),
    Refused("no tensors", read, "model: .*tensors", given=legacy(model={})),
    *(Refused(why, read, says, given=legacy(of=SMALL, model=entry))
      for why, (entry, says) in NO_MODELS.items()),
    Refused("layers that the files lack", read, r"layers: expected 4, as args.num_layers says",
            given=legacy(edited(0, without_a_layer))),
)  # fmt: skip


def test_a_flipped_bit_in_a_megatron_checkpoint_is_found(tmp_path):
    checkpoint, config = unpacked("gpt2", tmp_path)
    source = read_source(checkpoint, config=config)
    tensor = source.catalog["transformer.h.0.mlp.c_fc.weight"]
    file, key = next(iter(tensor.near(tensor.box))).stored
    begin, _ = next(file.byte_ranges(key))
    flip_bit(file.path, begin)
    with pytest.raises(BadCheckpoint, match="CRC-32"):
        convert(checkpoint, tmp_path / "hf", config=config, to="hf")
    assert not (tmp_path / "hf").exists()
