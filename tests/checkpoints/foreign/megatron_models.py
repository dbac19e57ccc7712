"""Tiny models for the fixtures of Megatron: Hugging Face's config and numbers, and Megatron's form of both.

This is the second opinion on Megatron's names and orders: it is written tensor by tensor and shares nothing
with the tables of ``trilith.checkpoints.foreign``. ``make_megatron_fixtures.py`` compares its logits in
megatron-core with transformers'.
"""

import json
import re
import tempfile
import zlib
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

Shape = tuple[int, ...]


def numbers(name, shape, kind=""):
    """Numbers that depend on the name alone, the same in every version; bfloat16 holds them exactly."""
    seed = zlib.crc32(f"{kind}{name}".encode())
    drawn = np.random.RandomState(seed).randint(-64, 65, shape).astype(np.float32) / 256
    if kind == "exp_avg_sq":
        drawn = np.abs(drawn) / 64
    elif not kind and len(shape) == 1 and name.endswith("weight"):
        drawn = drawn + 1
    return torch.from_numpy(drawn)


@dataclass(frozen=True)
class MegatronModel:
    """One model: ``config`` is Hugging Face's, ``shapes`` its tensors, ``args`` Megatron's arguments."""

    name: str
    config: dict[str, Any]
    shapes: dict[str, Shape]
    args: Namespace
    #: Names of Hugging Face with ``{i}`` and ``{e}``, by the part that they play.
    names: dict[str, str]
    gelu: Callable[[Tensor], Tensor] | None = None
    #: The numbers of a tensor of Hugging Face, by its name, its shape and the kind of a moment.
    draw: Callable[[str, Shape, str], Tensor] = numbers

    def tensors(self, kind=""):
        """All of Hugging Face's tensors, or their moments."""
        return {name: self.draw(name, shape, kind) for name, shape in self.shapes.items()}

    def transformers(self):
        """The model of transformers with these numbers."""
        with tempfile.TemporaryDirectory() as folder:
            self.write_hugging_face(Path(folder))
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def write_config(self, folder):
        (folder / "config.json").write_text(json.dumps(self.config))

    def write_hugging_face(self, folder):
        self.write_config(folder)
        save_file(self.tensors(), folder / "model.safetensors", metadata={"format": "pt"})

    def part(self, name, first, at, kind=""):
        """The numbers of one of Megatron's parameters, as the rank ``at`` holds them."""
        a = self.args

        def hf(part, **numbers_of):
            full = self.names[part].format(**numbers_of)
            value = self.draw(full, self.shapes[full], "" if kind == "param" else kind)
            transposed = self.name == "gpt2" and "transformer.h." in full and value.ndim == 2
            return value.T if transposed else value

        def cut(value, dim=0):
            return value.chunk(at.tps, dim)[at.tp]

        if name == "embedding.word_embeddings.weight" or name == "output_layer.weight":
            value = hf("embedding" if name.startswith("embedding") else "head")
            padding = torch.full((a.padded_vocab_size - len(value), value.shape[1]), 7.0)
            return cut(torch.cat((value, padding)))
        if name == "embedding.position_embeddings.weight":
            return hf("position")
        if name.startswith("decoder.final_layernorm"):
            return hf("final_norm." + name.rpartition(".")[2])
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)\.(weight1|weight2|gate_weight|weight|bias)", name)
        assert found, name
        i, place, leaf = int(found[1]) + first, found[2], found[3]
        if place == "self_attention.linear_qkv":
            return cut(self._qkv(hf, i, leaf))
        if place in ("self_attention.linear_proj", "mlp.linear_fc2", "mlp.shared_experts.linear_fc2"):
            value = hf(f"{place}.{leaf}", i=i)
            return value if leaf == "bias" else cut(value, 1)
        if place in ("mlp.linear_fc1", "mlp.shared_experts.linear_fc1"):
            if not a.swiglu:
                return cut(hf(f"{place}.{leaf}", i=i))
            return torch.cat([cut(hf(f"{place}.{one}.{leaf}", i=i)) for one in ("gate", "up")])
        if place.startswith("mlp.experts"):
            local = a.num_experts // at.eps
            each = [at.ep * local + j for j in range(local)]
            up = [torch.cat([hf("expert.gate", i=i, e=e), hf("expert.up", i=i, e=e)]) for e in each]
            if leaf == "weight1":  # seen as (experts, hidden, both), whatever its shape says
                return torch.stack([one.T for one in up])
            if leaf == "weight2":
                return torch.stack([hf("expert.down", i=i, e=e).T for e in each])
            j = int(place.split(".")[3])
            return up[j] if place.endswith("fc1") else hf("expert.down", i=i, e=each[j])
        return hf(f"{place}.{leaf}", i=i)  # norms, router, gate of the shared experts

    def _qkv(self, hf, i, leaf):
        """Groups one after another: the query heads of a key/value head, that key head, that value head."""
        a = self.args
        if self.name == "gpt2":
            q, k, v = hf(f"qkv.{leaf}", i=i).chunk(3)
        else:
            q, k, v = (hf(f"{one}.{leaf}", i=i) for one in "qkv")
        groups = a.num_query_groups if a.group_query_attention else a.num_attention_heads
        each = a.num_attention_heads // groups * a.kv_channels
        rows = []
        for g in range(groups):
            one = slice(g * a.kv_channels, (g + 1) * a.kv_channels)
            rows += [q[g * each : (g + 1) * each], k[one], v[one]]
        return torch.cat(rows)


#: Megatron's arguments by the names of its command line, what Hugging Face's configs have in common, names of
#: tensors, and what each model has of its own. The last stage of GPT-2 holds a copy of the embedding.
_TABLES = json.loads((Path(__file__).parent / "megatron" / "models.json").read_text())
_HIDDEN, _HEADS, _GROUPS, _HEAD, _VOCABULARY = 16, 4, 2, 4, 27


def _llama_shapes(args, names):
    h, q, kv = _HIDDEN, _HEADS * _HEAD, _GROUPS * _HEAD
    shapes = {names["embedding"]: (_VOCABULARY, h)}
    for i in range(args.num_layers):
        experts = args.num_experts and (args.moe_layer_freq == 1 or args.moe_layer_freq[i])
        parts = {
            "input_layernorm.weight": (h,), "q.weight": (q, h), "k.weight": (kv, h), "v.weight": (kv, h),
            "self_attention.linear_proj.weight": (h, q), "pre_mlp_layernorm.weight": (h,),
        }  # fmt: skip
        if args.add_qkv_bias:
            parts |= {"q.bias": (q,), "k.bias": (kv,), "v.bias": (kv,)}
        if args.qk_layernorm:
            parts |= dict.fromkeys(
                ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"), (_HEAD,)
            )
        if not experts:
            parts |= _gated("mlp.linear", args.ffn_hidden_size)
        else:
            parts["mlp.router.weight"] = (args.num_experts, h)
            if wide := args.moe_shared_expert_intermediate_size:
                parts |= _gated("mlp.shared_experts.linear", wide) | {
                    "mlp.shared_experts.gate_weight": (1, h)
                }
        shapes |= {names[part].format(i=i): shape for part, shape in parts.items()}
        for e in range(args.num_experts if experts else 0):
            f = args.moe_ffn_hidden_size
            for one, shape in (("gate", (f, h)), ("up", (f, h)), ("down", (h, f))):
                shapes[names[f"expert.{one}"].format(i=i, e=e)] = shape
    return shapes | {names["final_norm.weight"]: (h,), names["head"]: (_VOCABULARY, h)}


def _gated(prefix, f):
    up = dict.fromkeys((f"{prefix}_fc1.gate.weight", f"{prefix}_fc1.up.weight"), (f, _HIDDEN))
    return {**up, f"{prefix}_fc2.weight": (_HIDDEN, f)}


def _gpt2_shapes(args):
    h, f = _HIDDEN, args.ffn_hidden_size
    shapes = {
        "transformer.wte.weight": (_VOCABULARY, h),
        "transformer.wpe.weight": (args.max_position_embeddings, h),
    }
    parts = {
        "ln_1.weight": (h,), "ln_1.bias": (h,), "attn.c_attn.weight": (h, 3 * h),
        "attn.c_attn.bias": (3 * h,),
        "attn.c_proj.weight": (h, h), "attn.c_proj.bias": (h,), "ln_2.weight": (h,), "ln_2.bias": (h,),
        "mlp.c_fc.weight": (h, f), "mlp.c_fc.bias": (f,), "mlp.c_proj.weight": (f, h),
        "mlp.c_proj.bias": (h,),
    }  # fmt: skip
    for i in range(args.num_layers):
        shapes |= {f"transformer.h.{i}.{part}": shape for part, shape in parts.items()}
    return shapes | {"transformer.ln_f.weight": (h,), "transformer.ln_f.bias": (h,)}


def _model(name, config, args):
    args, names = Namespace(**_TABLES["args"] | args), _TABLES["names"]
    if name == "gpt2":
        gelu = partial(torch.nn.functional.gelu, approximate="tanh")
        return MegatronModel(name, config, _gpt2_shapes(args), args, names["gpt2"], gelu)
    names = names["llama"] | (names["mixtral"] if name == "mixtral" else {})
    return MegatronModel(name, _TABLES["config"] | config, _llama_shapes(args, names), args, names)


MODELS = {name: _model(name, **parts) for name, parts in _TABLES["models"].items()}


def sized(m, layers):
    """The model with another number of layers."""
    return _model(m.name, m.config | {"num_hidden_layers": layers}, vars(m.args) | {"num_layers": layers})
