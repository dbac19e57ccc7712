"""Translate the arguments of a Megatron-LM run to a recipe."""

import math
from typing import Any

from ...data.megatron import parse_blend
from ...parallel_state import BadInput
from ...system import counted
from .megatron_arguments import Arguments
from .megatron_model import model_shape, router_losses
from .translation import ForeignConfig, RecipeDraft, half_dtype, reason_of, set_compute, set_loss_scale

#: The ZeRO stage of each way in which Megatron-FSDP shards.
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
#: Our name of each of Megatron's shapes.
_SCHEDULES = {
    **{name: name for name in ("constant", "linear", "cosine")},
    **{"inverse-square-root": "inverse_sqrt", "WSD": "wsd"},
}
_DECAY_SHAPES = {"minus_sqrt": "1-sqrt", "exponential": "1-sqrt"}


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
    _axes(config, draft, ranks or arguments.ranks)
    _steps_and_schedule(config, draft, _batch(config, draft))
    _precision(config, draft)
    _optimizer(config, draft)
    _recompute(config, draft)
    if model_shape(config, draft):
        router_losses(config, draft)
    _data(config, draft)
    _saving(config, draft)
    return draft.finish(config, "megatron")


def _axes(config: ForeignConfig, draft: RecipeDraft, ranks: int | None) -> None:
    """Set the axes for this number of ranks; ``BadInput`` if the sizes do not divide it."""
    sizes = {
        "tensor": config.whole("tensor_model_parallel_size", 1, least=1) or 1,
        "pipeline": config.whole("pipeline_model_parallel_size", 1, least=1) or 1,
        "context": config.whole("context_parallel_size", 1, least=1) or 1,
    }
    replica_size = math.prod(sizes.values())
    if ranks is None:
        draft.miss_ranks("few as fit")
        ranks = replica_size
    if not ranks or ranks % replica_size:
        axes = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        todo = "Say the real number with --ranks"
        raise BadInput(draft.where, "ranks", expected=f"a multiple of {axes}", found=ranks, todo=todo)
    data = ranks // replica_size
    draft.set_axes(**sizes)
    draft.set("layout.data", data)
    draft.set("layout.sequence", (config.flag("sequence_parallel") and sizes["tensor"] > 1) or None)
    _zero(config, draft, data)
    _expert(config, draft, data * sizes["context"])
    expert_tensor = config.whole("expert_tensor_parallel_size", least=1)
    if expert_tensor not in (None, sizes["tensor"]):
        why = reason_of("megatron", "expert_tensor_parallel_size")
        draft.miss("expert_tensor_parallel_size", expert_tensor, why)
    _virtual(config, draft, sizes["pipeline"])


def _expert(config: ForeignConfig, draft: RecipeDraft, ranks: int) -> None:
    """Set expert parallelism: as many of ``ranks``, those of data and context, as it divides."""
    expert = config.whole("expert_model_parallel_size", 1, least=1) or 1
    size = math.gcd(expert, ranks)
    draft.set_axes(expert=size)
    if size != expert:
        why = f"experts lie on the {counted(ranks, 'rank')} of data and context"
        draft.miss("expert_model_parallel_size", expert, why)


def _zero(config: ForeignConfig, draft: RecipeDraft, data: int) -> None:
    strategy = config.one_of("data_parallel_sharding_strategy", _STRATEGIES) or "no_shard"
    distributed, fsdp = config.flag("use_distributed_optimizer"), config.flag("use_megatron_fsdp")
    stage = _STRATEGIES[strategy] if fsdp else int(distributed)
    if config.flag("use_torch_fsdp2"):
        config.require(not fsdp, "use_torch_fsdp2", "one of use_torch_fsdp2 and use_megatron_fsdp", "both")
        stage = 3
    draft.set("layout.zero", stage, "the distributed optimizer" if stage == 1 and distributed else "")
    replicas = config.whole("num_distributed_optimizer_instances", 1, least=1) or 1
    if replicas > 1 and stage:
        expected = f"a divisor of the {data} data ranks"
        config.require(data % replicas == 0, "num_distributed_optimizer_instances", expected, replicas)
        draft.set("layout.data_replicate", replicas)
    if config.flag("optimizer_cpu_offload"):
        draft.set_offload()


def _virtual(config: ForeignConfig, draft: RecipeDraft, pipeline: int) -> None:
    """Set the stages of a rank; with several, Megatron's schedule is the interleaved one."""
    stages = config.whole("num_virtual_stages_per_pipeline_rank", least=1)
    if (blocks := config.whole("num_layers_per_virtual_pipeline_stage", least=1)) is not None:
        layers = config.whole("num_layers", 0) or 0
        computed, rest = divmod(layers, pipeline * blocks)
        expected = f"a divisor of num_layers={layers} / pipeline_model_parallel_size={pipeline}"
        config.require(not rest, "num_layers_per_virtual_pipeline_stage", expected, blocks)
        same, expected = stages in (None, computed), f"{computed}, with {blocks} blocks a stage"
        config.require(same, "num_virtual_stages_per_pipeline_rank", expected, stages)  # Megatron stores both
        stages = computed
    if stages is None or stages == 1:
        return
    expected = f"at least 2 with {stages} stages a rank"
    config.require(pipeline > 1, "pipeline_model_parallel_size", expected, pipeline)
    draft.set("layout.schedule", "interleaved")
    draft.set("layout.virtual_stages", stages)


def _batch(config: ForeignConfig, draft: RecipeDraft) -> int:
    """Set the sizes of a step, and return its number of rows."""
    data = draft.values["layout.data"]
    if (micro_batch := config.whole("micro_batch_size", least=1)) is None:
        draft.miss("micro_batch_size", None, "Megatron has no default: taken as 1")
        micro_batch = 1
    rows = config.whole("global_batch_size", least=1) or micro_batch * data
    expected = f"a multiple of micro_batch_size={micro_batch} x {data} data ranks"
    config.require(rows % (micro_batch * data) == 0, "global_batch_size", expected, rows)
    draft.set("data.micro_batch", micro_batch)
    draft.set("data.global_batch", rows)
    draft.set("data.sequence_length", config.whole("seq_length", least=1))
    return rows


def _span(config: ForeignConfig, name: str, batch: int, *, by_samples: bool) -> int | None:
    """Return ``<name>_iters``, or ``<name>_samples`` in steps; the run and its spans must count alike."""
    iters, samples = config.whole(f"{name}_iters"), config.whole(f"{name}_samples")
    if iters and samples:
        if iters != samples // batch:  # Megatron stores both
            expected = f"{name}_iters={iters} x {counted(batch, 'row')}, or one of them"
            raise config.bad(f"{name}_samples", expected, samples)
    elif (samples and not by_samples) or (iters and by_samples):
        unit, other = ("samples", "iters") if by_samples else ("iters", "samples")
        raise config.bad(f"{name}_{other}", f"{name}_{unit} beside train_{unit}", samples or iters)
    return iters or (samples // batch if samples else iters)


def _steps_and_schedule(config: ForeignConfig, draft: RecipeDraft, batch: int) -> None:
    """Set the number of steps, of ``batch`` rows each, and the learning rate over them."""
    samples = config.whole("train_samples")
    by_samples = bool(samples)
    steps = _span(config, "train", batch, by_samples=by_samples)
    decay = _span(config, "lr_decay", batch, by_samples=by_samples) or steps
    warmup = _span(config, "lr_warmup", batch, by_samples=by_samples)
    wsd_decay = _span(config, "lr_wsd_decay", batch, by_samples=by_samples)
    fraction = config.number("lr_warmup_fraction")
    style = config.one_of("lr_decay_style", _SCHEDULES) or "linear"
    alone = fraction is None or not warmup
    config.require(alone, "lr_warmup_fraction", "this or a number of iterations or samples", "both")
    if steps is not None and decay is not None and decay > steps and style != "constant":
        draft.set("steps", decay, "the rate falls over these")
        draft.set("stop_after", steps)
    elif steps is not None:
        draft.set("steps", steps, counted(samples, "sample") if samples else "")
        if decay is not None and decay < steps and style != "constant":
            why = f"the rate is lowest after {counted(steps, 'step')}, the last one"
            draft.miss("lr_decay_samples" if by_samples else "lr_decay_iters", decay, why)
    draft.set("optimizer.schedule", _SCHEDULES[style])
    if fraction and decay:
        draft.set("optimizer.warmup", round(fraction * decay), f"{fraction:g} of the steps")
    elif fraction:
        draft.miss("lr_warmup_fraction", fraction, "a share of steps that are not said; set optimizer.warmup")
    else:
        draft.set("optimizer.warmup", warmup or 0)
    _rates(config, draft, style, wsd_decay)


def _rates(config: ForeignConfig, draft: RecipeDraft, style: str, wsd_decay: int | None) -> None:
    rate, minimum = config.number("lr"), config.number("min_lr", 0.0) or 0.0
    if rate is None:
        draft.miss("lr", None, "the file does not say it; set optimizer.lr")
    elif minimum > rate:
        raise config.bad("min_lr", f"at most lr={rate:g}", minimum)
    else:
        draft.set("optimizer.lr", rate)
    if rate and style != "constant":
        draft.set("optimizer.minimum_ratio", minimum / rate, f"min_lr = {minimum:g}")
    if style == "WSD":
        draft.set("optimizer.decay", wsd_decay or None)
        shape = config.text("lr_wsd_decay_style") or "exponential"
        draft.set("optimizer.decay_shape", _DECAY_SHAPES.get(shape, shape))
        if shape == "exponential":
            draft.miss("lr_wsd_decay_style", shape, "taken as 1-sqrt; linear and cosine are there too")


def _precision(config: ForeignConfig, draft: RecipeDraft) -> None:
    dtype = half_dtype(config, "fp16", fp16=config.flag("fp16"), bf16=config.flag("bf16"))
    if config.value("fp8"):
        config.require(dtype != "float16", "fp8", "bf16 beside it", "fp16")
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
    remarks = {"full": "by blocks", "selective": "all but matrix products and attention"}
    granularity = config.one_of("recompute_granularity", remarks)
    blocks = config.whole("recompute_num_layers", least=1)
    first_blocks = config.text("recompute_method") == "block" and granularity == "full"
    draft.set("memory.checkpointing", granularity, "" if first_blocks else remarks.get(granularity or "", ""))
    if first_blocks:
        draft.miss("recompute_num_layers", blocks, "all blocks are computed again, or every n-th one")


def _data(config: ForeignConfig, draft: RecipeDraft) -> None:
    train_paths = config.value("train_data_path")
    if (paths := config.value("data_path") or train_paths) is not None:
        _token_files(draft, paths)
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
