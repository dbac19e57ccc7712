"""List the keys of a config.json that change no forward, or change it as no family does, and limit them all;
define the types of fields with bounds that many families share, and fields with own keys.
"""

import warnings
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field

from ...parallel_state import BadInput
from ...system import literal


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Keys of a config.json that do not change the forward pass of a causal language model.
INERT = names("""
    _attn_implementation _attn_implementation_autoset _name_or_path _commit_hash architectures
    _sliding_window_pattern attn_implementation auto_map aux_loss_alpha bad_words_ids
    begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size
    eos_token_id ep_size experts_implementation exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label is_decoder
    keys_to_ignore_at_inference label2id length_penalty max_length min_length model_type n_ctx
    name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_past output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    seq_aux suppress_tokens task_specific_params selective_checkpoint_enabled sequence_parallel_enabled
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version transformers.js_config typical_p unsloth_fixed use_bfloat16 use_cache
""")

#: Keys that change the forward pass in ways that no family here computes; null or false passes.
DENIED = names("""
    quantization_config sliding_window attn_logit_softcapping final_logit_softcapping logits_scaling
    logit_scale embedding_multiplier residual_multiplier attention_multiplier partial_rotary_factor
    num_local_experts num_experts n_routed_experts use_qk_norm qk_layernorm query_pre_attn_scalar
    rope_interleaved alibi layer_types use_sliding_window no_rope_layers attention_chunk_size
    scale_embedding scale_depth pruned_heads add_cross_attention is_encoder_decoder clip_qkv
    compression_config use_parallel_residual rotary_pct rotary_dim qk_norm attn_temperature_tuning
    per_layer_config
""")


#: Limits of a config.json. Every tensor of a model has an entry in several tables long before it has memory,
#: so a huge number would fill the memory with tables. The largest published models have 126 blocks, or 61
#: with 256 experts each.
MOST_KEYS, MOST_BLOCKS, MOST_EXPERTS, LARGEST_NUMBER = 2**12, 2**14, 2**20, 2**31 - 1


def check_keys(raw: Mapping[str, Any], where: str) -> None:
    """Refuse more keys, on all levels together, than there is a use for: each that is unknown costs a warning
    or an error of its own.
    """
    tables: list[Mapping[str, Any]] = [raw]
    count = 0
    while tables:
        table = tables.pop()
        count += len(table)
        tables += [value for value in table.values() if isinstance(value, Mapping)]
        if count > MOST_KEYS:
            raise BadInput(where, expected=f"at most {MOST_KEYS} keys in all", found="more")


def check_file(raw: Mapping[str, Any], where: str) -> None:
    """Refuse what no config.json of a model may say; warn of code, which is never run."""
    check_keys(raw, where)
    for key in ("dtype", "torch_dtype"):  # what a converted model's config would state anew
        value = raw.get(key)
        dtype = getattr(torch, value, None) if isinstance(value, str) else None
        if value not in (None, "auto") and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            expected = "float32, bfloat16 or another floating type of torch's"
            raise BadInput(where, key, expected=expected, found=literal(value))
    if raw.get("auto_map"):
        warnings.warn(f"{where}: auto_map is ignored; no code from a checkpoint is run", stacklevel=3)


Whole = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(gt=0, le=2**24)]
Width = Annotated[int, Field(gt=0, le=2**22)]
HeadDim = Annotated[int, Field(gt=0, le=2**16, multiple_of=2)]
Experts = Annotated[int, Field(gt=0, le=2**12)]
Factor = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Epsilon = Annotated[float, Field(gt=0, lt=0.1)]
DropoutRate = Annotated[float, Field(ge=0, lt=1)]
#: Keys without a choice, and their values; ``ABSENT``: the key may not be there, or be null.
Fixed = Mapping[str, tuple[object, ...]]
NO, YES, ONE, ZERO, ABSENT = (False,), (True,), (1, 1.0), (0, 0.0), ()


def key(*keys: str, default: Any = ..., **bounds: Any) -> Any:
    """Make a field with the family's own keys: all of them are read, and the first is written.

    The field's name is no key unless it is among them: transformers ignores it, and it may only repeat what
    the own key says. A class that states the field anew without ``key`` keeps its keys.
    """
    return Field(default, json_schema_extra={"keys": [*keys]}, **bounds)
