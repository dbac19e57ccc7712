"""Translate what TrainingArguments holds of FSDP, accelerate's ``ParallelismConfig`` and DeepSpeed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...storage.small_files import read_json
from ...system import counted
from .from_deepspeed import from_deepspeed
from .translation import ULYSSES, ForeignConfig, RecipeDraft, is_off

#: How context ranks get keys and values: at once, or a piece at a time around a ring.
_STRATEGIES = {"allgather": False, "alltoall": True}


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes of its axes. ``shard`` and ``replicate``: the data ranks, both 1 if it states none."""

    tensor: int
    context: int
    shard: int
    replicate: int

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.shard * self.replicate


def read_sizes(config: ForeignConfig) -> Sizes:
    """Read ``parallelism_config``, by accelerate 1.15's names. transformers itself writes ``null`` there."""
    section = config.section("parallelism_config")
    names = ("tp_size", "cp_size", "sp_size", "dp_shard_size", "dp_replicate_size")
    tensor, context, ulysses, shard, replicate = (section.whole(name, least=1) or 1 for name in names)
    section.require(1 in (context, ulysses), "sp_size", f"1 with cp_size={context}", ulysses)
    return Sizes(tensor, max(context, ulysses), shard, replicate)


def parallelism(config: ForeignConfig, draft: RecipeDraft, sizes: Sizes, ranks: int) -> None:
    """Set the axes; the other ranks of ``ranks`` are data ranks."""
    replica_size = sizes.tensor * sizes.context
    shards_data = sizes.shard * sizes.replicate > 1
    if ranks % replica_size or (shards_data and "layout.data" not in draft.values and ranks != sizes.ranks):
        expected = f"sizes whose product is the {counted(ranks, 'rank')}"
        raise config.bad("parallelism_config", expected, sizes.ranks if shards_data else replica_size)
    section = config.section("parallelism_config")
    draft.set_axes(tensor=sizes.tensor)
    if sizes.context > 1:
        ulysses = (section.whole("sp_size") or 1) > 1
        draft.set("layout.context", sizes.context, ULYSSES if ulysses else "")
    strategy = section.section("cp_handler").one_of("cp_comm_strategy", _STRATEGIES)
    if strategy is not None and sizes.context > 1:
        draft.set("layout.ring", _STRATEGIES[strategy])
    if sizes.shard > 1 and sizes.replicate > 1:
        draft.set("layout.data_replicate", sizes.replicate, f"replicas of {sizes.shard} shards each")
    draft.values.setdefault("layout.data", ranks // replica_size)


#: Legacy words of ``fsdp``, and what FSDP 1 has for ``reshard_after_forward``.
_STAGES = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2, "no_shard": 0}
#: Keys for the modules that FSDP wraps: here each block.
_WRAPS = ("transformer_layer_cls_to_wrap", "min_num_params", "auto_wrap_policy")


def fsdp(config: ForeignConfig, draft: RecipeDraft, ranks: int) -> None:
    """Translate ``fsdp`` and ``fsdp_config``: stage, offload, checkpointing; ``config`` lists the rest."""
    setting, section = config.value("fsdp"), config.section("fsdp_config")
    for key in _WRAPS:
        _either(section, key)
    if not setting:
        return
    if setting is True:
        setting = "full_shard"
    words = setting if isinstance(setting, list) else str(setting).split()
    for word in map(str, words):
        if word in _STAGES:
            draft.set("layout.zero", _STAGES[word])
        elif word == "offload":
            draft.set("memory.offload", True)
        elif word not in ("auto_wrap", "no_wrap"):
            raise config.bad("fsdp", f"words out of {', '.join(_STAGES)}, offload, auto_wrap", setting)
        if word.startswith("hybrid") and ranks > 1 and "layout.data_replicate" not in draft.values:
            draft.miss("fsdp", word, "set layout.data_replicate to the number of hosts")
    reshard = _either(section, "reshard_after_forward")
    # It refines ``fsdp`` true or "full_shard"; legacy words that shard less are kept.
    if reshard is not None and draft.values.get("layout.zero", 3) == 3:
        stages: dict[str, int] = {**_STAGES, "true": 3, "false": 2}
        name = str(reshard).lower()
        section.require(name in stages, "reshard_after_forward", "true or false", reshard)
        draft.set("layout.zero", stages[name], "reshard_after_forward" if name == "false" else "")
    if any(not is_off(_either(section, key)) for key in ("cpu_offload", "offload_params")):
        draft.set("memory.offload", True)
    if str(_either(section, "activation_checkpointing")).lower() == "true":
        draft.set("memory.checkpointing", "full")


def _either(section: ForeignConfig, key: str) -> object:
    """Return the value of the key, or of its old name, which begins with ``fsdp_``."""
    setting, old = section.value(key), section.value(f"fsdp_{key}")
    return setting if setting is not None else old


def deepspeed_file(config: ForeignConfig) -> tuple[Mapping[str, Any], str]:
    """Return DeepSpeed's configuration and its place: in this file, in one beside it, or at a named path."""
    setting = config.value("deepspeed")
    if isinstance(setting, dict):
        return setting, config.where
    neighbour = Path(config.where).parent / str(setting)
    file = neighbour if neighbour.exists() else Path(str(setting))
    return read_json(file), str(file)


def with_arguments(
    value: Mapping[str, Any], where: str, arguments: Mapping[str, Any], sizes: Sizes, ranks: int | None
) -> RecipeDraft:
    """Translate a DeepSpeed configuration whose "auto" values come from TrainingArguments, and so do the axes
    that it does not name itself.

    It fills them in as transformers' ``HfTrainerDeepSpeedConfig`` does.
    """
    axes: dict[str, Any] = {"tensor_parallel": {"autotp_size": sizes.tensor}} if sizes.tensor > 1 else {}
    axes |= {"sequence_parallel_size": sizes.context} if sizes.context > 1 else {}
    autos = {
        "train_micro_batch_size_per_gpu": arguments["per_device_train_batch_size"],
        "gradient_accumulation_steps": arguments["gradient_accumulation_steps"],
        "optimizer.params.weight_decay": arguments["weight_decay"],
        **{f"{dtype}.enabled": bool(arguments.get(dtype)) for dtype in ("fp16", "bf16")},
        **dict.fromkeys(
            ("optimizer.params.lr", "scheduler.params.warmup_max_lr"), arguments["learning_rate"]
        ),
        # These are set from the arguments themselves, whatever DeepSpeed's file says.
        **dict.fromkeys(("optimizer.params.betas", "optimizer.params.eps", "gradient_clipping")),
        **dict.fromkeys(f"scheduler.params.{key}" for key in ("warmup_num_steps", "total_num_steps")),
        "train_batch_size": None,
    }
    draft = from_deepspeed({**axes, **value}, where, ranks=ranks, autos=autos)
    draft.missed = [line for line in draft.missed if not line.startswith("optimizer = null")]
    return draft
