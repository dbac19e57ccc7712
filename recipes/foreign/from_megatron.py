"""Translate the arguments of a Megatron-LM run to a recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...data.megatron import parse_blend
from ...parallel_state import BadInput
from .megatron_arguments import Arguments
from .megatron_layout import layout
from .megatron_model import model_shape
from .megatron_reasons import reason_of
from .megatron_schedule import steps_and_schedule
from .translation import Given, Translation


def from_megatron(arguments: Arguments, where: str, *, ranks: int | None = None) -> Translation:
    """Translate Megatron's arguments to a recipe, as far as there is one.

    ``ranks``: how many processes train, instead of what the arguments say. Raises ``BadInput`` for a file
    without such arguments, and for arguments that contradict each other.
    """
    given = Given(arguments.values, where)
    if not given.raw.keys() & {"num_layers", "micro_batch_size", "tensor_model_parallel_size", "train_iters"}:
        keys = ", ".join(list(given.raw)[:5]) or "(none)"
        raise BadInput(where, expected="arguments of Megatron-LM", found=f"arguments {keys}")
    found = Translation(where)
    found.missed += arguments.unsure
    found.set("out", given.text("save") or "run")
    found.set("device", "cuda")
    found.set("seed", given.whole("seed", 1234))
    layout(given, found, ranks or arguments.ranks)
    batch = _batch(given, found)
    steps_and_schedule(given, found, batch)
    _precision(given, found)
    _optimizer(given, found)
    _recompute(given, found)
    config = model_shape(given, found)
    _experts(given, found, config)
    _data(given, found)
    _saving(given, found, batch)
    for key, value in given.left():
        found.miss(key, value, reason_of(key))
    found.check()
    return found


def _batch(given: Given, found: Translation) -> int:
    """Set the sizes of a step, and return the rows of one."""
    data = found.values["layout.data"]
    micro = given.whole("micro_batch_size", least=1)
    total = given.whole("global_batch_size", least=1)
    if micro is None:
        found.miss("micro_batch_size", None, "Megatron has no default: taken as 1")
    total = total or (micro or 1) * data
    if total % ((micro or 1) * data):
        expected = f"a multiple of micro_batch_size={micro or 1} x {data} data ranks"
        raise given.bad("global_batch_size", expected, total)
    found.set("data.micro_batch", micro or 1)
    found.set("data.global_batch", total)
    if (length := given.whole("seq_length", least=1)) is not None:
        found.set("data.sequence_length", length)
    else:
        found.blank("data.sequence_length", "tokens a row")
    if rampup := given.value("rampup_batch_size"):
        found.miss("rampup_batch_size", rampup, f"every step has {total} rows")
    return total


def _precision(given: Given, found: Translation) -> None:
    half, brain, eight = given.flag("fp16"), given.flag("bf16"), given.value("fp8")
    if half and brain:
        raise given.bad("fp16", "fp16 or bf16", "both")
    if eight:
        if half:
            raise given.bad("fp8", "bf16 beside it", "fp16")
        found.set("compute", "float8", "weights and moments stay in float32")
        recipe = given.text("fp8_recipe") or "delayed"
        if recipe != "tensorwise":
            found.miss("fp8_recipe", recipe, "scales are made from the numbers at hand, one a tensor")
    elif half or brain:
        found.set("compute", "float16" if half else "bfloat16", "weights and moments stay in float32")
    if half:
        static = given.number("loss_scale")
        initial = static or given.number("initial_loss_scale", 2.0**32) or 1.0
        nearest = 2.0 ** math.floor(math.log2(initial))
        found.set("loss_scale.initial", nearest)
        found.set("loss_scale.maximum", max(nearest, 2.0**24))
        found.set(
            "loss_scale.minimum",
            min(nearest, 2.0 ** math.floor(math.log2(given.number("min_loss_scale", 1.0) or 1.0))),
        )
        found.set("loss_scale.growth_interval", 0 if static else given.whole("loss_scale_window", 1000))
        if nearest != initial:
            found.miss("initial_loss_scale", initial, "not a power of two; the nearest below is taken")
        if (patience := given.whole("hysteresis", 2)) != 1 and not static:
            found.miss("hysteresis", patience, "the scale halves at the first overflow")
    if given.flag("grad_reduce_in_bf16"):
        found.set("reduce", "bfloat16")
    given.flag("accumulate_allreduce_grads_in_fp32")  # as here, where nothing else is said


def _optimizer(given: Given, found: Translation) -> None:
    kind = given.text("optimizer") or "adam"
    if kind not in ("adam", "distributed_fused_adam"):
        found.miss("optimizer", kind, "AdamW is the only optimizer here")
    found.set("optimizer.betas", [given.number("adam_beta1", 0.9), given.number("adam_beta2", 0.999)])
    found.set("optimizer.eps", given.number("adam_eps", 1e-8))
    found.set("optimizer.weight_decay", given.number("weight_decay", 0.01))
    found.set("optimizer.clip", given.number("clip_grad", 1.0))
    if (style := given.text("weight_decay_incr_style") or "constant") != "constant":
        found.miss("weight_decay_incr_style", style, "weight decay stays as it is")


def _recompute(given: Given, found: Translation) -> None:
    granularity, blocks = given.text("recompute_granularity"), given.whole("recompute_num_layers", least=1)
    method = given.text("recompute_method")
    if granularity == "full":
        found.set("memory.checkpointing", "full", "by blocks" if method != "block" else "")
        if method == "block":
            found.miss("recompute_num_layers", blocks, "all blocks are computed again, or every n-th one")
    elif granularity == "selective":
        found.set("memory.checkpointing", "selective", "all but matrix products and attention")
    elif granularity is not None:
        raise given.bad("recompute_granularity", "full or selective", granularity)


def _experts(given: Given, found: Translation, config: dict[str, Any] | None) -> None:
    """Set the factors of the routers' losses: here a mean over routers, in Megatron a sum."""
    if config is None or not (count := given.whole("num_experts")):
        return
    kind = given.value("moe_router_load_balancing_type") or "aux_loss"
    factor, topk = given.number("moe_aux_loss_coeff", 0.0), given.whole("moe_router_topk", 2) or 2
    layers = given.whole("num_layers") or 1
    if factor and kind in ("aux_loss", "seq_aux_loss"):
        remark = f"{factor:g} x {layers} blocks / {topk} experts a token"
        found.set("experts.balance", factor * layers / topk, remark)
        if kind == "aux_loss":
            found.miss("moe_router_load_balancing_type", kind, "computed for each row, as by seq_aux_loss")
    elif kind not in ("none", "aux_loss", "seq_aux_loss"):
        found.miss("moe_router_load_balancing_type", kind, f"the {count} experts have a balance loss or none")
    if z := given.number("moe_z_loss_coeff"):
        found.set("experts.z_loss", z * layers, f"{z:g} x {layers} blocks")


def _data(given: Given, found: Translation) -> None:
    words = given.value("data_path") or given.value("train_data_path")
    given.value("train_data_path")
    held, every, rows = (
        given.value("valid_data_path"),
        given.value("eval_interval"),
        given.value("eval_iters"),
    )
    if words is None:
        found.blank("data.tokens", "what `trilith tokenize` wrote")
    else:
        _blend(found, words)
    if held is not None:
        names, weights = parse_blend(_words(held), found.where)
        if weights is not None:
            found.miss("valid_data_path", held, "held-out files have no weights: each is read by its size")
        found.set("evaluation.tokens", names)
        found.set("evaluation.every", given.whole("eval_interval", 1000, least=1))
        rows_a_step = found.values["data.global_batch"]
        found.set("evaluation.samples", (given.whole("eval_iters", 100) or 1) * rows_a_step)
    elif every or rows:
        why = "needs held-out tokens: set [evaluation] tokens, every and samples"
        found.miss("eval_interval, eval_iters", [every, rows], why)
    if (split := given.value("split")) is not None and held is None:
        found.miss("split", split, "every document of data.tokens is trained on")
    separate = [given.flag(key) for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")]
    if any(separate):
        found.set(
            "data.documents", "separate", "" if all(separate) else "positions, attention and labels together"
        )
    kind, name = given.text("tokenizer_type"), given.text("tokenizer_model")
    if kind == "HuggingFaceTokenizer" and name:
        found.set("model.tokenizer", name)
    elif kind not in (None, "NullTokenizer"):
        found.miss("tokenizer_type", kind, "set model.tokenizer to a Hugging Face folder")


def _blend(found: Translation, words: Any) -> None:
    names, weights = parse_blend(_words(words), found.where)
    how = "with an index beside each: trilith tokenize PREFIX --from megatron --out PREFIX"
    found.set("data.tokens", names if len(names) > 1 else names[0], how)
    if weights is not None and len(names) > 1:
        found.set("data.weights", weights)


def _words(value: Any) -> Sequence[str]:
    return [str(word) for word in (value if isinstance(value, list) else [value])]


def _saving(given: Given, found: Translation, batch: int) -> None:
    if every := given.whole("save_interval"):
        found.set("checkpoint.every", every)
    if given.flag("async_save"):
        found.set("checkpoint.background", True)
    if every := given.whole("log_interval"):
        found.set("log_every", every)
    if given.value("tensorboard_dir"):
        found.set("watch.trackers", ["tensorboard"])
    load, save = given.value("load"), given.value("save")
    for key, path in (
        ("load", load if load != save else None),
        ("pretrained_checkpoint", given.value("pretrained_checkpoint")),
    ):
        if path:
            found.miss(key, path, "a checkpoint of Megatron's: `trilith convert` it, and set model.init_from")
