"""Say why an argument of Megatron has no counterpart in a recipe."""

from __future__ import annotations

from .translation import NO_COUNTERPART

_ENGINE = "how Megatron does it; what is computed stays the same"
_DATA = "how Megatron reads its data; token files are mapped"
_WATCHED = "metrics are in metrics.jsonl, and every step's seconds with them"
_CHECKPOINT = "checkpoints are whole in any layout; see [checkpoint]"

#: Beginnings of names, the longest that fits counts.
_REASONS = {
    "overlap_": _ENGINE,
    "tp_comm_": _ENGINE,
    "attention_backend": "see attention_backend in docs/recipe.md: the first one that can is taken",
    "use_flash_attn": "see attention_backend in docs/recipe.md: the first one that can is taken",
    "transformer_impl": _ENGINE,
    "params_dtype": "see compute; weights and moments stay in float32",
    "use_mcore_models": _ENGINE,
    "use_legacy_models": _ENGINE,
    "masked_softmax_fusion": _ENGINE,
    "no_masked_softmax_fusion": _ENGINE,
    "cross_entropy_": _ENGINE,
    "gradient_accumulation_fusion": _ENGINE,
    "no_gradient_accumulation_fusion": _ENGINE,
    "bias_": _ENGINE,
    "no_bias_": _ENGINE,
    "no_rope_fusion": _ENGINE,
    "no_persist_layer_norm": _ENGINE,
    "manual_gc": _ENGINE,
    "empty_unused_memory_level": _ENGINE,
    "distributed_backend": _ENGINE,
    "distributed_timeout_minutes": "set timeout, in seconds",
    "use_cpu_initialization": _ENGINE,
    "cuda_graph": _ENGINE,
    "enable_cuda_graph": _ENGINE,
    "external_cuda_graph": _ENGINE,
    "moe_grouped_gemm": _ENGINE,
    "moe_permute_fusion": _ENGINE,
    "moe_token_dispatcher_type": _ENGINE,
    "moe_router_dtype": "routers compute in float32",
    "moe_per_layer_logging": _WATCHED,
    "moe_expert_capacity_factor": "no token of an expert is dropped",
    "moe_pad_expert_input_to_capacity": "no token of an expert is dropped",
    "calculate_per_token_loss": "the loss is a mean over all tokens of the step here",
    "check_for_nan": "a loss or gradient that is not finite stops the run",
    "no_check_for_nan": "a loss or gradient that is not finite stops the run",
    "ddp_": _ENGINE,
    "ckpt_": _CHECKPOINT,
    "dist_ckpt_": _CHECKPOINT,
    "auto_detect_ckpt_format": _CHECKPOINT,
    "use_dist_ckpt": _CHECKPOINT,
    "no_load_": _CHECKPOINT,
    "no_save_": _CHECKPOINT,
    "finetune": "weights alone come with model.init_from",
    "exit_": "set stop_after, in steps",
    "data_cache_path": _DATA,
    "mmap_bin_files": _DATA,
    "no_mmap_bin_files": _DATA,
    "num_workers": "set data.prefetch, the batches made ahead",
    "create_attention_mask_in_dataloader": _DATA,
    "no_create_attention_mask_in_dataloader": _DATA,
    "dataloader_type": "rows are shuffled anew in each epoch",
    "mock_data": "set data.tokens to a token file",
    "vocab_file": "set model.tokenizer to a Hugging Face folder",
    "merge_file": "set model.tokenizer to a Hugging Face folder",
    "tokenizer_model": "set model.tokenizer to a Hugging Face folder",
    "tiktoken_": "set model.tokenizer to a Hugging Face folder",
    "make_vocab_size_divisible_by": "rows of padding are never stored",
    "log_": _WATCHED,
    "timing_log_": _WATCHED,
    "wandb_": _WATCHED,
    "tensorboard_": _WATCHED,
    "profile": "set watch.trace_steps",
    "use_pytorch_profiler": "set watch.trace_steps",
    "decoupled_": "set [[optimizer.groups]] with a match and lr_scale",
    "fp8_": "scales are made from the numbers at hand, one a tensor",
    "distribute_saved_activations": "what is recomputed is kept nowhere",
    "recompute_": "docs/memory.md says what each value of memory.checkpointing computes again",
    "decoder_first_pipeline_num_layers": "set layout.split; the cut changes no result",
    "decoder_last_pipeline_num_layers": "set layout.split; the cut changes no result",
    "account_for_": "blocks are cut by what they cost, embedding and loss included",
    "pipeline_model_parallel_layout": "set layout.split; the cut changes no result",
    "expert_tensor_parallel_size": "an expert is cut over the tensor ranks as all else is",
    "start_weight_decay": "weight decay stays as it is",
    "end_weight_decay": "weight decay stays as it is",
    "rotary_percent": "this family turns a whole head",
    "window_size": "set sliding_window in model.config, where the family has one",
    "attention_softmax_in_fp32": "softmax is computed in float32 at least",
    "apply_query_key_layer_scaling": "softmax is computed in float32 at least",
    "no_query_key_layer_scaling": "softmax is computed in float32 at least",
    "max_position_embeddings": "the model is not known",
}


def reason_of(key: str) -> str:
    """Return why the argument ``key`` is not in the recipe."""
    fits = [beginning for beginning in _REASONS if key.startswith(beginning)]
    return _REASONS[max(fits, key=len)] if fits else NO_COUNTERPART
