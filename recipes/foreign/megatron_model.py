"""Translate the shape of Megatron's model to a config of the zoo, or to the name of a published size."""

from __future__ import annotations

from typing import Any

from ...models import family_of, published_sizes
from .translation import Given, Translation

#: Fields that a run may set differently for one and the same published size.
_FREE = {
    *("max_position_embeddings", "initializer_range", "attention_dropout", "rope_theta", "rope_scaling"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "residual_dropout", "embedding_dropout"),
    *("layer_norm_epsilon", "n_positions", "rms_norm_eps", "norm_topk_prob"),
}
#: What the vocabularies of tokenizers have, where Megatron's arguments leave it to the tokenizer.
_VOCABULARIES = {"GPT2BPETokenizer": 50257}
#: Settings that no family here computes as Megatron does.
_FOREIGN = {
    "multi_latent_attention": "a latent for keys and values",
    "moe_shared_expert_intermediate_size": "an expert that every token has",
    "squared_relu": "a squared ReLU",
    "hybrid_override_pattern": "blocks of several kinds",
    "hybrid_layer_pattern": "blocks of several kinds",
    "mtp_num_layers": "blocks that predict further tokens",
    "moe_router_enable_expert_bias": "biases of experts",
    "rotary_interleaved": "rotation of neighbours",
    "apply_residual_connection_post_layernorm": "norms on the residual path",
    "heterogeneous_layers_config_path": "blocks of several shapes",
}


def model_shape(given: Given, found: Translation) -> dict[str, Any] | None:
    """Set the model's keys, and return its config; ``None`` if no family here is that model."""
    needed = ("num_layers", "hidden_size", "num_attention_heads")
    if None in [given.whole(key, least=1) for key in needed]:
        found.blank("model.init_from", "a Hugging Face folder, or model.config to start from scratch")
        return None
    if given.raw.get("max_position_embeddings") is None and given.raw.get("seq_length") is None:
        found.blank("model.init_from", "a Hugging Face folder, or model.config to start from scratch")
        found.miss("max_position_embeddings", None, "the file says no length, so the model is not known")
        return None
    fields, why = _fields(given)
    if fields is None:
        found.blank("model.init_from", "a Hugging Face folder, or model.config to start from scratch")
        found.miss("the model", why, "no family here has this shape, as far as this table knows")
        return None
    if (hidden := _dropouts(given)[1]) and not any(
        "dropout" in key or "pdrop" in key for key in fields if key != "attention_dropout"
    ):
        found.miss("hidden_dropout", hidden, f"{fields['model_type']} has none; Megatron's default is 0.1")
    vocabulary = given.whole("vocab_size", least=1) or _VOCABULARIES.get(str(given.raw.get("tokenizer_type")))
    if vocabulary is None and (vocabulary := given.whole("padded_vocab_size", least=1)):
        found.miss("padded_vocab_size", vocabulary, "with rows of padding; set the tokenizer's own number")
    stated = {"vocab_size": vocabulary or 2**16, **fields}
    if (size := _published(stated, given.where, with_vocabulary=vocabulary is not None)) is not None:
        name, changes = size
        found.set("model.size", name, "by its shape")
        for key, value in changes.items():
            found.set(f"model.config.{key}", value)
        return stated
    for key, value in fields.items():
        found.set(f"model.config.{key}", value)
    if vocabulary:
        found.set("model.config.vocab_size", vocabulary)
    else:
        found.blank("model.config.vocab_size", "the number of the tokenizer's ids")
    return stated


def _published(
    stated: dict[str, Any], where: str, *, with_vocabulary: bool
) -> tuple[str, dict[str, Any]] | None:
    """Return the published size that is this model with the fewest changes of fields, and these changes."""
    family = family_of(stated, where)

    def shape(fields: dict[str, Any]) -> dict[str, Any]:
        left = {"router_aux_loss_coef"} if with_vocabulary else {"router_aux_loss_coef", "vocab_size"}
        return family.from_hf(fields, where).model_dump(exclude=left)

    ours, found = shape(stated), list[tuple[str, dict[str, Any]]]()
    for size in published_sizes().values():
        if size.fields["model_type"] != stated["model_type"]:
            continue
        theirs = shape(size.with_fields({}))
        changes = {key: value for key, value in stated.items() if key in _FREE and theirs.get(key) != value}
        if shape(size.with_fields(changes)) == ours:
            found.append((size.name, changes))
    return min(found, key=lambda size: len(size[1]), default=None)


def _fields(given: Given) -> tuple[dict[str, Any] | None, str]:
    """Return the fields of a config.json without the vocabulary; or ``None``, and why there is none."""
    foreign = [what for key, what in _FOREIGN.items() if given.value(key)]
    rms = (given.text("normalization") or "LayerNorm") == "RMSNorm"
    kind = given.text("position_embedding_type") or "learned_absolute"
    given.value("add_position_embedding")
    gated, experts = given.flag("swiglu"), given.whole("num_experts")
    given.flag("use_mcore_models"), given.flag("apply_layernorm_1p")
    bias = given.value("add_bias_linear") is not False
    qkv_bias, qk_norm = given.flag("add_qkv_bias"), given.flag("qk_layernorm")
    tied = not given.flag("untie_embeddings_and_output_weights")
    fraction = given.number("rotary_percent", 1.0)
    if given.value("moe_router_score_function") not in (None, "softmax"):
        foreign.append("scores of experts by a sigmoid")
    if str(given.value("moe_layer_freq") or 1) != "1":
        foreign.append("experts in some blocks only")
    if foreign:
        return None, ", ".join(foreign)
    base = _base(given, tied=tied)
    rope = _rope(given)
    if kind == "learned_absolute" and not (rms or gated or experts or qk_norm) and bias and tied:
        return _gpt2(given, base), ""
    if kind == "rope" and rms and gated and not bias and fraction == 1.0:
        norm = {"rms_norm_eps": given.number("norm_epsilon", 1e-5), "attention_dropout": _dropouts(given)[0]}
        if experts:
            return _experts(given, {**base, **rope, **norm}, experts, qkv_bias, qk_norm)
        name = {(False, False): "llama", (True, False): "qwen2", (False, True): "qwen3"}.get(
            (qkv_bias, qk_norm)
        )
        if name is not None:
            return {"model_type": name, **base, **rope, **norm}, ""
    if kind == "rope" and not (rms or experts or qk_norm):
        attention, hidden = _dropouts(given)
        eps = given.number("norm_epsilon", 1e-5)
        if gated and not bias:
            own = {"use_qkv_bias": qkv_bias, "partial_rotary_factor": fraction, "layer_norm_eps": eps}
            drops = {"attention_dropout": attention, "hidden_dropout": hidden}
            return {"model_type": "stablelm", **base, **rope, **own, **drops}, ""
        if bias and not gated and fraction == 1.0:
            own = {"use_bias": True, "norm_epsilon": eps}
            drops = {"attention_dropout": attention, "residual_dropout": hidden, "embedding_dropout": hidden}
            return {"model_type": "starcoder2", **base, **rope, **own, **drops}, ""
    parts = [
        f"positions {kind}",
        "RMSNorm" if rms else "LayerNorm",
        "SwiGLU" if gated else "GELU",
        "linear biases" if bias else "no linear biases",
        *(["biases of queries, keys and values"] if qkv_bias else []),
        *(["norms of queries and keys"] if qk_norm else []),
        *([f"{experts} experts"] if experts else []),
        *([f"rotation of {fraction:g} of a head"] if fraction != 1.0 else []),
        "tied" if tied else "untied",
    ]
    return None, ", ".join(parts)


def _base(given: Given, *, tied: bool) -> dict[str, Any]:
    """Return the fields that families share."""
    hidden, heads = given.whole("hidden_size") or 1, given.whole("num_attention_heads") or 1
    inner = given.whole("ffn_hidden_size", least=1)
    if inner is None:
        inner = int(4 * hidden * 2 / 3 / 64) * 64 if given.flag("swiglu") else 4 * hidden
    grouped = given.flag("group_query_attention")
    groups = given.whole("num_query_groups", least=1)
    channels = given.whole("kv_channels", least=1)
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": given.whole("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": (groups or 1) if grouped else heads,
        **({"head_dim": channels} if channels and channels * heads != hidden else {}),
        "max_position_embeddings": given.whole("max_position_embeddings", least=1)
        or given.whole("seq_length", least=1),
        "tie_word_embeddings": tied,
        "initializer_range": given.number("init_method_std", 0.02),
    }


def _rope(given: Given) -> dict[str, Any]:
    theta = given.number("rotary_base", 10000.0)
    scaled, factor = given.flag("use_rope_scaling"), given.number("rope_scaling_factor", 8.0)
    linear = given.number("rotary_seq_len_interpolation_factor")
    scaling: dict[str, Any] | None = None
    if scaled:
        low_high = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            **low_high,
            "original_max_position_embeddings": 8192,
        }
    elif linear and linear != 1.0:
        scaling = {"rope_type": "linear", "factor": linear}
    return {"rope_theta": float(theta or 0.0), **({"rope_scaling": scaling} if scaling else {})}


def _gpt2(given: Given, base: dict[str, Any]) -> dict[str, Any]:
    attention, hidden = _dropouts(given)
    return {
        "model_type": "gpt2",
        "n_embd": base["hidden_size"],
        "n_layer": base["num_hidden_layers"],
        "n_head": base["num_attention_heads"],
        "n_inner": base["intermediate_size"],
        "n_positions": base["max_position_embeddings"],
        "layer_norm_epsilon": given.number("norm_epsilon", 1e-5),
        "initializer_range": base["initializer_range"],
        **{"attn_pdrop": attention, "resid_pdrop": hidden, "embd_pdrop": hidden},
    }


def _experts(
    given: Given, fields: dict[str, Any], experts: int, qkv_bias: bool, qk_norm: bool
) -> tuple[dict[str, Any] | None, str]:
    first = given.flag("moe_router_pre_softmax")
    each = given.whole("moe_ffn_hidden_size", least=1) or fields["intermediate_size"]
    chosen = {"num_experts_per_tok": given.whole("moe_router_topk", 2, least=1)}
    if qk_norm and not qkv_bias:
        own = {"num_experts": experts, "moe_intermediate_size": each, "norm_topk_prob": not first}
        return {"model_type": "qwen3_moe", **fields, **chosen, **own}, ""
    if not (first or qkv_bias):
        return {
            "model_type": "mixtral",
            **fields,
            **chosen,
            "num_local_experts": experts,
            "intermediate_size": each,
        }, ""
    return None, "experts with biases of queries, or weights of experts that do not add up to 1"


def _dropouts(given: Given) -> tuple[float, float]:
    return given.number("attention_dropout", 0.1) or 0.0, given.number("hidden_dropout", 0.1) or 0.0
