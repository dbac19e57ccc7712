"""Write a Llama as Megatron-LM stores it, from its Hugging Face tensors: one DCP folder, or a file a rank."""

from __future__ import annotations

import json
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

_RENAMED = {
    "input_layernorm": "input_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.down_proj": "mlp.linear_fc2",
}
#: The dimension by which tensor ranks cut a tensor; all others are whole on each.
_CUT = {"word_embeddings": 0, "output_layer": 0, "linear_qkv": 0, "linear_proj": 1, "linear_fc2": 1}


def megatron_tensors(
    config: dict[str, Any], hf: dict[str, Tensor], ranks: int = 1
) -> dict[str, list[Tensor]]:
    """Return every tensor as each of the tensor ranks holds it, by Megatron's names."""
    whole = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    parts: dict[str, list[Tensor]] = {}
    groups = config["num_key_value_heads"]
    for i in range(config["num_hidden_layers"]):
        there, here = f"model.layers.{i}.", f"decoder.layers.{i}."
        whole |= {f"{here}{new}.weight": hf[f"{there}{old}.weight"] for old, new in _RENAMED.items()}
        q, k, v = (hf[f"{there}self_attn.{one}_proj.weight"].chunk(groups) for one in "qkv")
        whole[f"{here}self_attention.linear_qkv.weight"] = torch.cat(
            [one for group in zip(q, k, v, strict=True) for one in group]
        )
        gate, up = (hf[f"{there}mlp.{one}_proj.weight"].chunk(ranks) for one in ("gate", "up"))
        parts[f"{here}mlp.linear_fc1.weight"] = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
    for name, tensor in whole.items():
        dim = _CUT.get(name.split(".")[-2])
        parts[name] = [tensor] * ranks if dim is None else list(tensor.chunk(ranks, dim))
    return parts


def write_torch_dist(folder: Path, config: dict[str, Any], hf: dict[str, Tensor]) -> None:
    """Write ``folder`` in the form ``torch_dist``."""
    tensors = {name: each[0] for name, each in megatron_tensors(config, hf).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    torch.save({"iteration": 1, "args": _arguments(config)}, folder / "common.pt")
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"})
    )


def write_legacy(folder: Path, config: dict[str, Any], hf: dict[str, Tensor], ranks: int = 2) -> None:
    """Write ``folder`` in Megatron's first form, for ``ranks`` tensor ranks."""
    parts = megatron_tensors(config, hf, ranks)
    for rank in range(ranks):
        path = folder / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        model = {name: each[rank].clone() for name, each in parts.items()}
        args = _arguments(config, tensor_model_parallel_size=ranks)
        torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": model}, path)


def _arguments(config: dict[str, Any], **other: Any) -> Namespace:
    return Namespace(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        group_query_attention=True,
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        ffn_hidden_size=config["intermediate_size"],
        padded_vocab_size=config["vocab_size"],
        normalization="RMSNorm",
        position_embedding_type="rope",
        swiglu=True,
        untie_embeddings_and_output_weights=True,
        **other,
    )
