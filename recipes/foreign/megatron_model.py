"""Translate the shape of Megatron's model to a config of the zoo."""

from typing import Any

from ...models import family_of
from .translation import ForeignConfig, RecipeDraft, settings_of

#: What the vocabularies of tokenizers have, where Megatron's arguments leave it to the tokenizer.
_VOCABULARIES = {"GPT2BPETokenizer": 50257}
_INTERPOLATION = "rotary_seq_len_interpolation_factor"


def model_shape(config: ForeignConfig, draft: RecipeDraft) -> bool:
    """Set the model's keys, and tell whether a family here is that model."""
    fields = _family_fields(config, draft)
    if fields is None:
        return False
    if (hidden := _dropouts(config)[1]) and not any(
        "dropout" in key or "pdrop" in key for key in fields if key != "attention_dropout"
    ):
        draft.miss("hidden_dropout", hidden, f"{fields['model_type']} has none; Megatron's default is 0.1")
    tokenizer = str(config.raw.get("tokenizer_type"))
    vocabulary = config.whole("vocab_size", least=1) or _VOCABULARIES.get(tokenizer)
    if vocabulary is None and (vocabulary := config.whole("padded_vocab_size", least=1)):
        draft.miss("padded_vocab_size", vocabulary, "with rows of padding; set the tokenizer's own number")
    # Refuses a shape that no model has.
    family_of(fields, config.where).from_hf({"vocab_size": vocabulary or 2**16, **fields}, config.where)
    for key, field in fields.items():
        draft.set(f"model.config.{key}", field)
    draft.set("model.config.vocab_size", vocabulary)
    return True


def _family_fields(config: ForeignConfig, draft: RecipeDraft) -> dict[str, Any] | None:
    """Return the fields of a config.json without the vocabulary; ``None`` if no family here has them."""
    if None in [config.whole(key, least=1) for key in ("num_layers", "hidden_size", "num_attention_heads")]:
        return None
    if config.raw.get("max_position_embeddings") is None and config.raw.get("seq_length") is None:
        draft.miss("max_position_embeddings", None, "the file says no length, so the model is not known")
        return None
    fields, shape = _fields(config)
    if fields is None:
        draft.miss("the model", shape, "no family here has this shape, as far as this table knows")
    return fields


def _fields(config: ForeignConfig) -> tuple[dict[str, Any] | None, str]:
    """Return the fields, or ``None`` and a description of the model."""
    unsupported = [what for key, what in settings_of("megatron")["unsupported"].items() if config.value(key)]
    rms = (config.text("normalization") or "LayerNorm") == "RMSNorm"
    kind = config.text("position_embedding_type") or "learned_absolute"
    gated, experts = config.flag("swiglu"), config.whole("num_experts")
    bias = config.value("add_bias_linear") is not False
    qkv_bias, qk_norm = config.flag("add_qkv_bias"), config.flag("qk_layernorm")
    tied = not config.flag("untie_embeddings_and_output_weights")
    fraction = config.number("rotary_percent", 1.0)
    scores, frequency = config.value("moe_router_score_function"), config.value("moe_layer_freq") or 1
    if experts and scores not in (None, "softmax"):
        unsupported.append("scores of experts by a sigmoid")
    if experts and {*map(str, frequency if isinstance(frequency, list) else [frequency])} != {"1"}:
        unsupported.append("experts in some blocks only")
    if kind == "rope" and config.flag("use_rope_scaling") and config.number(_INTERPOLATION, 1.0) != 1.0:
        unsupported.append("two scalings of rope")
    if unsupported:
        return None, ", ".join(unsupported)
    base = _base(config, tied=tied)
    if kind == "learned_absolute" and not (rms or gated or experts or qk_norm) and bias and tied:
        return _gpt2(config, base), ""
    base |= _rope(config)
    if kind == "rope" and rms and gated and not bias and fraction == 1.0:
        base |= {"rms_norm_eps": config.number("norm_epsilon", 1e-5)}
        base |= {"attention_dropout": _dropouts(config)[0]}
        if experts:
            return _experts(config, base, experts, qkv_bias, qk_norm)
        families = {(False, False): "llama", (True, False): "qwen2", (False, True): "qwen3"}
        if (family := families.get((qkv_bias, qk_norm))) is not None:
            return {"model_type": family, **base}, ""
    if kind == "rope" and not (rms or experts or qk_norm):
        attention, hidden = _dropouts(config)
        base["attention_dropout"] = attention
        eps = config.number("norm_epsilon", 1e-5)
        if gated and not bias:
            stablelm = {"use_qkv_bias": qkv_bias, "partial_rotary_factor": fraction, "layer_norm_eps": eps}
            return {"model_type": "stablelm", **base, **stablelm, "hidden_dropout": hidden}, ""
        if bias and not gated and fraction == 1.0:
            starcoder2 = {"use_bias": True, "norm_epsilon": eps}
            dropouts = {"residual_dropout": hidden, "embedding_dropout": hidden}
            return {"model_type": "starcoder2", **base, **starcoder2, **dropouts}, ""
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


def _base(config: ForeignConfig, *, tied: bool) -> dict[str, Any]:
    """Return the fields that families share."""
    hidden, heads = config.whole("hidden_size") or 1, config.whole("num_attention_heads") or 1
    inner = config.whole("ffn_hidden_size", least=1)
    if inner is None:
        inner = int(4 * hidden * 2 / 3 / 64) * 64 if config.flag("swiglu") else 4 * hidden
    grouped = config.flag("group_query_attention")
    groups = config.whole("num_query_groups", least=1)
    channels = config.whole("kv_channels", least=1)
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": config.whole("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": (groups or 1) if grouped else heads,
        **({"head_dim": channels} if channels and channels * heads != hidden else {}),
        "max_position_embeddings": config.whole("max_position_embeddings", least=1)
        or config.whole("seq_length", least=1),
        "tie_word_embeddings": tied,
        "initializer_range": config.number("init_method_std", 0.02),
    }


def _rope(config: ForeignConfig) -> dict[str, Any]:
    theta = config.number("rotary_base", 10000.0)
    factor = config.number("rope_scaling_factor", 8.0)
    linear = config.number(_INTERPOLATION)
    scaling: dict[str, Any] = {}
    if config.flag("use_rope_scaling"):
        scaling = {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": 8192}
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    elif linear and linear != 1.0:
        scaling = {"rope_type": "linear", "factor": linear}
    return {"rope_theta": float(theta or 0.0), **({"rope_scaling": scaling} if scaling else {})}


def _gpt2(config: ForeignConfig, base: dict[str, Any]) -> dict[str, Any]:
    attention, hidden = _dropouts(config)
    return {
        "model_type": "gpt2",
        "n_embd": base["hidden_size"],
        "n_layer": base["num_hidden_layers"],
        "n_head": base["num_attention_heads"],
        "n_inner": base["intermediate_size"],
        "n_positions": base["max_position_embeddings"],
        "layer_norm_epsilon": config.number("norm_epsilon", 1e-5),
        "initializer_range": base["initializer_range"],
        **{"attn_pdrop": attention, "resid_pdrop": hidden, "embd_pdrop": hidden},
    }


def _experts(
    config: ForeignConfig, fields: dict[str, Any], experts: int, qkv_bias: bool, qk_norm: bool
) -> tuple[dict[str, Any] | None, str]:
    pre_softmax = config.flag("moe_router_pre_softmax")
    inner = config.whole("moe_ffn_hidden_size", least=1) or fields["intermediate_size"]
    fields = {**fields, "num_experts_per_tok": config.whole("moe_router_topk", 2, least=1)}
    if qk_norm and not qkv_bias:
        qwen3 = {"num_experts": experts, "moe_intermediate_size": inner, "norm_topk_prob": not pre_softmax}
        return {"model_type": "qwen3_moe", **fields, **qwen3}, ""
    if not (pre_softmax or qkv_bias):
        mixtral = {"num_local_experts": experts, "intermediate_size": inner}
        return {"model_type": "mixtral", **fields, **mixtral}, ""
    return None, "experts with biases of queries, or weights of experts that do not add up to 1"


def _dropouts(config: ForeignConfig) -> tuple[float, float]:
    return config.number("attention_dropout", 0.1) or 0.0, config.number("hidden_dropout", 0.1) or 0.0


def router_losses(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the factors of the routers' losses: here a mean over routers, in Megatron a sum."""
    if not (count := config.whole("num_experts")):
        return
    kind = config.value("moe_router_load_balancing_type") or "aux_loss"
    factor, topk = config.number("moe_aux_loss_coeff", 0.0), config.whole("moe_router_topk", 2) or 2
    layers = config.whole("num_layers") or 1
    if factor and kind in ("aux_loss", "seq_aux_loss"):
        remark = f"{factor:g} x {layers} blocks / {topk} experts a token"
        draft.set("experts.balance", factor * layers / topk, remark)
        if kind == "aux_loss":
            draft.miss("moe_router_load_balancing_type", kind, "computed for each row, as by seq_aux_loss")
    elif kind not in ("none", "aux_loss", "seq_aux_loss"):
        draft.miss("moe_router_load_balancing_type", kind, f"the {count} experts have a balance loss or none")
    if z := config.number("moe_z_loss_coeff"):
        draft.set("experts.z_loss", z * layers, f"{z:g} x {layers} blocks")
