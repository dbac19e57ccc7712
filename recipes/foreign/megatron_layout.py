"""Translate Megatron's parallel sizes, and how its optimizer shards, to a layout."""

from __future__ import annotations

import math

from ...parallel_state import BadInput
from .translation import Given, Translation

#: The ZeRO stage of each way in which Megatron-FSDP shards.
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def layout(given: Given, found: Translation, ranks: int | None) -> None:
    """Set the axes for this number of ranks; ``BadInput`` if the sizes do not divide it."""
    sizes = {
        "tensor": given.whole("tensor_model_parallel_size", 1, least=1) or 1,
        "pipeline": given.whole("pipeline_model_parallel_size", 1, least=1) or 1,
        "context": given.whole("context_parallel_size", 1, least=1) or 1,
    }
    each = math.prod(sizes.values())
    if ranks is None:
        found.miss(
            "ranks", None, "the file does not say how many there are: taken as few as fit; say --ranks"
        )
        ranks = each
    if not ranks or ranks % each:
        axes = " x ".join(f"{key}={size}" for key, size in sizes.items())
        todo = "Say the real number with --ranks"
        raise BadInput(found.where, "ranks", expected=f"a multiple of {axes}", found=ranks, todo=todo)
    data = ranks // each
    for key, size in sizes.items():
        if size > 1:
            found.set(f"layout.{key}", size)
    found.set("layout.data", data)
    if given.flag("sequence_parallel") and sizes["tensor"] > 1:
        found.set("layout.sequence", True)
    _zero(given, found, data)
    if (expert := given.whole("expert_model_parallel_size", 1, least=1) or 1) > 1:
        room = data * sizes["context"]
        fits = math.gcd(expert, room)
        if fits > 1:
            found.set("layout.expert", fits)
        if fits != expert:
            found.miss(
                "expert_model_parallel_size", expert, f"experts lie on the {room} ranks of data and context"
            )
    across = given.whole("expert_tensor_parallel_size", least=1)
    if across not in (None, sizes["tensor"]):
        found.miss(
            "expert_tensor_parallel_size", across, "an expert is cut over the tensor ranks as all else is"
        )
    _virtual(given, found, sizes["pipeline"])


def _zero(given: Given, found: Translation, data: int) -> None:
    strategy = given.text("data_parallel_sharding_strategy") or "no_shard"
    if strategy not in _STRATEGIES:
        raise given.bad("data_parallel_sharding_strategy", " or ".join(_STRATEGIES), strategy)
    distributed, fsdp = given.flag("use_distributed_optimizer"), given.flag("use_megatron_fsdp")
    stage = _STRATEGIES[strategy] if fsdp else int(distributed)
    if given.flag("use_torch_fsdp2"):
        if fsdp:
            raise given.bad("use_torch_fsdp2", "one of use_torch_fsdp2 and use_megatron_fsdp", "both")
        stage = 3
    found.set("layout.zero", stage, "the distributed optimizer" if stage == 1 and distributed else "")
    copies = given.whole("num_distributed_optimizer_instances", 1, least=1) or 1
    if copies > 1 and stage:
        if data % copies:
            raise given.bad(
                "num_distributed_optimizer_instances", f"a divisor of the {data} data ranks", copies
            )
        found.set("layout.data_replicate", copies)
    if given.flag("optimizer_cpu_offload"):
        found.set("memory.offload", True, "weights, gradients and moments together")


def _virtual(given: Given, found: Translation, pipeline: int) -> None:
    """Set the stages of a rank; with several, Megatron's schedule is the interleaved one."""
    stages = given.whole("num_virtual_stages_per_pipeline_rank", least=1)
    if (blocks := given.whole("num_layers_per_virtual_pipeline_stage", least=1)) is not None:
        layers = given.whole("num_layers", 0) or 0
        if layers % (pipeline * blocks):
            expected = f"a divisor of num_layers={layers} / pipeline_model_parallel_size={pipeline}"
            raise given.bad("num_layers_per_virtual_pipeline_stage", expected, blocks)
        if stages not in (None, layers // (pipeline * blocks)):  # Megatron stores both
            expected = f"{layers // (pipeline * blocks)}, with {blocks} blocks a stage"
            raise given.bad("num_virtual_stages_per_pipeline_rank", expected, stages)
        stages = layers // (pipeline * blocks)
    if stages is None or stages == 1:
        return
    if pipeline == 1:
        raise given.bad("pipeline_model_parallel_size", f"at least 2 with {stages} stages a rank", 1)
    found.set("layout.schedule", "interleaved")
    found.set("layout.virtual_stages", stages)
