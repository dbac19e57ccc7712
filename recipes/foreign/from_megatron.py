"""Translate the arguments of a Megatron-LM run to a recipe."""

from typing import Any

from ...data.megatron import parse_blend
from .megatron_arguments import Arguments
from .megatron_layout import layout, steps_and_schedule
from .megatron_model import model_shape
from .translation import ForeignConfig, RecipeDraft, half_dtype, reason_of, set_compute, set_loss_scale


def from_megatron(arguments: Arguments, where: str, *, ranks: int | None = None) -> RecipeDraft:
    """Translate Megatron's arguments to a recipe, as far as there is one.

    ``ranks``: how many processes train, instead of what the arguments say. Raises ``BadInput`` for a file
    without such arguments, and for arguments that contradict each other.
    """
    config = ForeignConfig(arguments.values, where)
    keys = {"num_layers", "micro_batch_size", "tensor_model_parallel_size", "train_iters"}
    config.check_kind(keys, "arguments of Megatron-LM", noun="arguments")
    draft = RecipeDraft(where)
    draft.missed += arguments.unsure
    draft.set("out", config.text("save") or "run")
    draft.set("device", "cuda")
    draft.set("seed", config.whole("seed", 1234))
    layout(config, draft, ranks or arguments.ranks)
    steps_and_schedule(config, draft, _batch(config, draft))
    _precision(config, draft)
    _optimizer(config, draft)
    _recompute(config, draft)
    if model_shape(config, draft):
        _experts(config, draft)
    _data(config, draft)
    _saving(config, draft)
    return draft.finish(config, "megatron")


def _batch(config: ForeignConfig, draft: RecipeDraft) -> int:
    """Set the sizes of a step, and return its number of rows."""
    data = draft.values["layout.data"]
    if (micro_batch := config.whole("micro_batch_size", least=1)) is None:
        draft.miss("micro_batch_size", None, "Megatron has no default: taken as 1")
        micro_batch = 1
    rows = config.whole("global_batch_size", least=1) or micro_batch * data
    if rows % (micro_batch * data):
        expected = f"a multiple of micro_batch_size={micro_batch} x {data} data ranks"
        raise config.bad("global_batch_size", expected, rows)
    draft.set("data.micro_batch", micro_batch)
    draft.set("data.global_batch", rows)
    draft.set_or_blank("data.sequence_length", config.whole("seq_length", least=1))
    return rows


def _precision(config: ForeignConfig, draft: RecipeDraft) -> None:
    dtype = half_dtype(config, "fp16", fp16=config.flag("fp16"), bf16=config.flag("bf16"))
    if config.value("fp8"):
        if dtype == "float16":
            raise config.bad("fp8", "bf16 beside it", "fp16")
        dtype = "float8"
        if (scaling := config.text("fp8_recipe") or "delayed") != "tensorwise":
            draft.miss("fp8_recipe", scaling, "scales are made from the numbers at hand, one a tensor")
    set_compute(draft, dtype)
    if dtype == "float16":
        static = config.number("loss_scale")
        initial = static or config.number("initial_loss_scale", 2.0**32) or 1.0
        set_loss_scale(config, draft, initial, static=bool(static))
    draft.set("reduce", "bfloat16" if config.flag("grad_reduce_in_bf16") else None)


def _optimizer(config: ForeignConfig, draft: RecipeDraft) -> None:
    kind = config.text("optimizer") or "adam"
    if kind not in ("adam", "distributed_fused_adam"):
        draft.miss("optimizer", kind, "AdamW is the only optimizer here")
    draft.set("optimizer.betas", [config.number("adam_beta1", 0.9), config.number("adam_beta2", 0.999)])
    draft.set("optimizer.eps", config.number("adam_eps", 1e-8))
    draft.set("optimizer.weight_decay", config.number("weight_decay", 0.01))
    draft.set("optimizer.clip", config.number("clip_grad", 1.0))


def _recompute(config: ForeignConfig, draft: RecipeDraft) -> None:
    granularity, blocks = config.text("recompute_granularity"), config.whole("recompute_num_layers", least=1)
    remarks = {None: "", "full": "by blocks", "selective": "all but matrix products and attention"}
    if granularity not in remarks:
        raise config.bad("recompute_granularity", "full or selective", granularity)
    first_blocks = config.text("recompute_method") == "block" and granularity == "full"
    draft.set("memory.checkpointing", granularity, "" if first_blocks else remarks[granularity])
    if first_blocks:
        draft.miss("recompute_num_layers", blocks, "all blocks are computed again, or every n-th one")


def _experts(config: ForeignConfig, draft: RecipeDraft) -> None:
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


def _data(config: ForeignConfig, draft: RecipeDraft) -> None:
    train_paths = config.value("train_data_path")
    _token_files(draft, config.value("data_path") or train_paths)
    held_out_paths = config.value("valid_data_path")
    if held_out_paths is not None:
        names, weights = _blend(draft, held_out_paths)
        if weights is not None:
            why = "held-out files have no weights: each is read by its size"
            draft.miss("valid_data_path", held_out_paths, why)
        draft.set("evaluation.tokens", names)
        draft.set("evaluation.every", config.whole("eval_interval", 1000, least=1))
        batches = config.whole("eval_iters", 100) or 1
        draft.set("evaluation.samples", batches * draft.values["data.global_batch"])
    if (split := config.value("split")) is not None and held_out_paths is None:
        draft.miss("split", split, "every document of data.tokens is trained on")
    separate = [config.flag(key) for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")]
    if any(separate):
        remark = "" if all(separate) else "positions, attention and labels together"
        draft.set("data.documents", "separate", remark)
    kind, name = config.text("tokenizer_type"), config.text("tokenizer_model")
    if kind == "HuggingFaceTokenizer" and name:
        draft.set("model.tokenizer", name)
    elif kind not in (None, "NullTokenizer"):
        draft.miss("tokenizer_type", kind, "set model.tokenizer to a Hugging Face folder")


def _token_files(draft: RecipeDraft, paths: Any) -> None:
    if paths is None:
        draft.blank("data.tokens")
        return
    names, weights = _blend(draft, paths)
    remark = "with an index beside each: trilith tokenize PREFIX --from megatron --out PREFIX"
    draft.set("data.tokens", names if len(names) > 1 else names[0], remark)
    draft.set("data.weights", weights if len(names) > 1 else None)


def _blend(draft: RecipeDraft, paths: Any) -> tuple[list[str], list[float] | None]:
    """Return the names of token files and their weights, which stand in turns before the names."""
    return parse_blend([str(word) for word in (paths if isinstance(paths, list) else [paths])], draft.where)


def _saving(config: ForeignConfig, draft: RecipeDraft) -> None:
    draft.set("checkpoint.every", config.whole("save_interval") or None)
    draft.set("checkpoint.background", config.flag("async_save") or None)
    draft.set("log_every", config.whole("log_interval") or None)
    draft.set("watch.trackers", ["tensorboard"] if config.value("tensorboard_dir") else None)
    if (load := config.value("load")) and load != config.value("save"):
        draft.miss("load", load, reason_of("megatron", "pretrained_checkpoint"))
