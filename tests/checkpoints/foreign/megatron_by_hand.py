"""Write checkpoints in Megatron's forms by hand, for what its writers do not offer on a CPU.

The distributed form is written by ``torch.distributed.checkpoint``, as Megatron does, with ``common.pt`` and
``metadata.json`` as ``megatron/core/dist_checkpointing`` writes them.
"""

import io
import json
import tarfile
import warnings
from argparse import Namespace
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from megatron_models import MODELS

#: What Megatron's own writers wrote, by name.
WRITTEN = {
    path.name.split(".")[0]: path for path in sorted((Path(__file__).parent / "megatron").glob("*.tar.xz"))
}
#: What Megatron Bridge writes beside a checkpoint.
BRIDGE = (
    "model:\n  num_layers: 4\n  num_attention_heads: 4\n  num_query_groups: {groups}\n  kv_channels: 4\n"
    "  normalization: RMSNorm\n  layernorm_epsilon: 1.0e-05\n  gated_linear_unit: true\n"
    "  activation_func: {{_target_: torch.nn.functional.silu, _call_: false}}\n"
    "  share_embeddings_and_output_weights: false\n  rotary_base: 10000\n"
    "  position_embedding_type: rope\n"
)
ALONE = SimpleNamespace(tp=0, tps=1, ep=0, eps=1)
#: The tensors of a layer of ``llama`` in megatron-core's local layers.
_LAYER = (
    *("input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj"),
    *("pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2"),
)
_ENDS = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")
#: The norms' names where Transformer Engine computes them together with the layer after them.
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def model_of(name):
    return next(MODELS[one] for one in sorted(MODELS, key=len, reverse=True) if name.startswith(one))


def config_of(m, folder, **changed):
    """Write the model's config without weights; return its folder."""
    made = folder / "config"
    made.mkdir(exist_ok=True)
    replace(m, config=m.config | changed).write_config(made)
    return made


def unpacked(name, folder):
    """Return the checkpoint that Megatron's writers wrote, and the folder with the model's config."""
    with tarfile.open(WRITTEN[name]) as tar:
        tar.extractall(folder, filter="data")
    return folder / "iter_0000003", config_of(model_of(name), folder)


def names_of(m):
    """Megatron's names of the tensors of ``llama``."""
    layers = [f"decoder.layers.{i}.{one}.weight" for i in range(m.args.num_layers) for one in _LAYER]
    return [_ENDS[0], *layers, *_ENDS[1:]]


def whole(m, kind=""):
    """All tensors of ``llama`` as one rank holds them, or their moments."""
    return {name: m.part(name, 0, ALONE, kind).contiguous() for name in names_of(m)}


def write_dist(folder, weights, *, args, states=None, prefix="", iteration=3, updates=3, other=None):
    """Write ``folder`` in the form ``torch_dist``; ``states``: those of the optimizer, by weight."""
    tensors = {f"{prefix}{name}": value for name, value in weights.items()}
    for state, values in (states or {}).items():
        tensors |= {f"optimizer.state.{state}.{prefix}{name}": value for name, value in values.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**tensors, **(other or {})}, checkpoint_id=folder, no_dist=True)
    groups = {"optimizer": {"param_groups": [{"lr": 1e-3}, {"lr": 1e-3, "step": updates}]}}
    common = {"iteration": iteration, "checkpoint_version": 3.0, "optimizer": groups}
    if args is not None:
        common["args"] = args
    torch.save(common, folder / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps({**backend, "common_backend_version": 1}))
    return folder


def shared_dicts(number, levels):
    """Return dicts that are the same one many times over, on each of the levels."""
    inside = {"number": 1}
    for _ in range(levels):
        inside = {str(key): inside for key in range(number)}
    return inside


def extra_state():
    """Return what a layer stores beside its weights."""
    saved = io.BytesIO()
    torch.save(None, saved)
    return saved


#: The names of releases before megatron-core.
_OLDER = {
    "input_layernorm": "input_norm",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_norm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}


def older_model(m, at):
    """The nested dict in which releases before megatron-core hold one tensor rank's part of ``llama``."""
    part = {name: m.part(name, 0, at).clone() for name in names_of(m)}
    encoder = {"final_norm.weight": part["decoder.final_layernorm.weight"]}
    for name, value in part.items():
        if name.startswith("decoder.layers."):
            number, local = name.removeprefix("decoder.layers.").removesuffix(".weight").split(".", 1)
            encoder[f"layers.{number}.{_OLDER[local]}.weight"] = value
    return {
        "language_model": {
            "embedding": {"word_embeddings": {"weight": part["embedding.word_embeddings.weight"]}},
            "encoder": encoder,
            "output_layer": {"weight": part["output_layer.weight"]},
        }
    }


def write_rank(folder, **state):
    """Write the file of one rank into its folder."""
    folder.mkdir(parents=True)
    torch.save({"checkpoint_version": 3.0, "iteration": 3, **state}, folder / "model_optim_rng.pt")


def write_legacy(folder, m, ranks, **other):
    """Write a folder of tensor ranks with the older names; ``other``: further entries of each file."""
    for rank in range(ranks):
        args = Namespace(**vars(m.args), tensor_model_parallel_size=ranks, pipeline_model_parallel_size=1)
        model = older_model(m, SimpleNamespace(tp=rank, tps=ranks, ep=0, eps=1))
        write_rank(folder / f"mp_rank_{rank:02d}", **{"args": args, "model": model, **other})
    return folder


def write_stages(folder, m):
    """Write two pipeline ranks whose virtual stages have one layer each."""
    last = m.args.num_layers - 1
    for rank in range(2):
        models = {}
        for first in range(rank, m.args.num_layers, 2):
            ends = (_ENDS[:1] if first == 0 else ()) + (_ENDS[1:] if first == last else ())
            names = [*ends, *(f"decoder.layers.0.{one}.weight" for one in _LAYER)]
            models[f"model{first // 2}"] = {name: m.part(name, first, ALONE).clone() for name in names}
        args = Namespace(**vars(m.args), pipeline_model_parallel_size=2)
        write_rank(folder / f"mp_rank_00_{rank:03d}", args=args, **models)
    return folder


def write_experts(folder, m, ranks):
    """Write ``mixtral`` for expert ranks as Transformer Engine holds it: numbered experts, fused norms."""
    for rank in range(ranks):
        at = SimpleNamespace(tp=0, tps=1, ep=rank, eps=ranks)
        names = [*_ENDS]
        for i in range(m.args.num_layers):
            names += [f"decoder.layers.{i}.{one}.weight" for one in (*_LAYER[:4], "mlp.router")]
        model = {name: m.part(name, 0, at).clone() for name in names}
        for i, j in product(range(m.args.num_layers), range(m.args.num_experts // ranks)):
            for layer in ("linear_fc1", "linear_fc2"):
                name = f"decoder.layers.{i}.mlp.experts.local_experts.{j}.{layer}.weight"
                model[f"decoder.layers.{i}.mlp.experts.{layer}.weight{j}"] = m.part(name, 0, at).clone()
            norm = f"decoder.layers.{i}.input_layernorm.weight"
            fused = norm.replace("input_layernorm.weight", FUSED["input_layernorm.weight"])
            model[fused] = m.part(norm, 0, at)
            model.pop(norm, None)
        args = Namespace(**vars(m.args), tensor_model_parallel_size=1, expert_model_parallel_size=ranks)
        write_rank(folder / f"mp_rank_00_{rank:03d}", model=model, args=args)
    return folder
