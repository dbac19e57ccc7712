"""Translate what TrainingArguments holds of FSDP and of accelerate's ``ParallelismConfig`` to a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .translation import Given, Translation, is_off

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


def read_sizes(given: Given) -> Sizes:
    """Read ``parallelism_config``, by accelerate 1.15's names. transformers itself writes ``null`` there."""
    section = given.section("parallelism_config")
    names = ("tp_size", "cp_size", "sp_size", "dp_shard_size", "dp_replicate_size")
    tensor, context, ulysses, shard, replicate = (section.whole(name, least=1) or 1 for name in names)
    if context > 1 and ulysses > 1:
        raise section.bad("sp_size", f"1 with cp_size={context}", ulysses)
    for only in ("cp_backend", "sp_backend"):
        section.value(only)  # there is one of each
    return Sizes(tensor, max(context, ulysses), shard, replicate)


def into_deepspeed(theirs: Mapping[str, Any], sizes: Sizes) -> Mapping[str, Any]:
    """Return a DeepSpeed configuration with the axes added that it does not name itself."""
    added: dict[str, Any] = {}
    if sizes.tensor > 1:
        added["tensor_parallel"] = {"autotp_size": sizes.tensor}
    if sizes.context > 1:
        added["sequence_parallel_size"] = sizes.context
    return {**added, **theirs}


def parallelism(given: Given, found: Translation, sizes: Sizes, ranks: int) -> None:
    """Set the axes; the other ranks of ``ranks`` are data ranks."""
    each = sizes.tensor * sizes.context
    stated = sizes.shard * sizes.replicate > 1
    if ranks % each or (stated and "layout.data" not in found.values and ranks != sizes.ranks):
        expected = f"sizes whose product is the {ranks} ranks"
        raise given.bad("parallelism_config", expected, sizes.ranks if stated else each)
    section = given.section("parallelism_config")
    if sizes.tensor > 1:
        found.set("layout.tensor", sizes.tensor)
    if sizes.context > 1:
        ulysses = (section.whole("sp_size") or 1) > 1
        found.set("layout.context", sizes.context, ULYSSES if ulysses else "")
    strategy = section.section("cp_handler").text("cp_comm_strategy")
    if strategy is not None and sizes.context > 1:
        if strategy not in _STRATEGIES:
            raise section.bad("cp_handler.cp_comm_strategy", " or ".join(_STRATEGIES), strategy)
        found.set("layout.ring", _STRATEGIES[strategy])
    if sizes.shard > 1 and sizes.replicate > 1:
        found.set("layout.data_replicate", sizes.replicate, f"replicas of {sizes.shard} shards each")
    found.values.setdefault("layout.data", ranks // each)


ULYSSES = "Ulysses deals heads out; here keys and values are gathered"


def check_shards(found: Translation, sizes: Sizes) -> None:
    """Report shards that shard nothing, after ``fsdp`` and ``deepspeed`` were read."""
    if sizes.shard > 1 and not found.values.get("layout.zero"):
        found.values.pop("layout.data_replicate", None)
        found.miss("parallelism_config.dp_shard_size", sizes.shard, "fsdp is off; set layout.zero")


#: Legacy words of ``fsdp``, and what FSDP 1 has for ``reshard_after_forward``.
_STAGES = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2, "no_shard": 0}
#: Keys for the modules that FSDP wraps: here each block.
WRAPS = ("transformer_layer_cls_to_wrap", "min_num_params", "auto_wrap_policy")


def fsdp(given: Given, found: Translation, ranks: int) -> None:
    """Translate ``fsdp`` and ``fsdp_config``: stage, offload, checkpointing; ``given`` lists the rest."""
    value, section = given.value("fsdp"), given.section("fsdp_config")
    for key in WRAPS:
        _either(section, key)
    if not value:
        return
    words = value if isinstance(value, list) else ["full_shard"] if value is True else str(value).split()
    for word in map(str, words):
        if word in _STAGES:
            found.set("layout.zero", _STAGES[word])
        elif word == "offload":
            found.set("memory.offload", True)
        elif word not in ("auto_wrap", "no_wrap"):
            raise given.bad("fsdp", f"words out of {', '.join(_STAGES)}, offload, auto_wrap", value)
        if word.startswith("hybrid") and ranks > 1 and "layout.data_replicate" not in found.values:
            found.miss("fsdp", word, "set layout.data_replicate to the number of hosts")
    reshard = _either(section, "reshard_after_forward")
    # It refines ``fsdp`` true or "full_shard"; legacy words that shard less are kept.
    if reshard is not None and found.values.get("layout.zero", 3) == 3:
        stages: dict[str, int] = {**_STAGES, "true": 3, "false": 2}
        name = str(reshard).lower()
        if name not in stages:
            raise section.bad("reshard_after_forward", "true or false", reshard)
        found.set("layout.zero", stages[name], "reshard_after_forward" if name == "false" else "")
    if any(not is_off(_either(section, key)) for key in ("cpu_offload", "offload_params")):
        found.set("memory.offload", True)
    if str(_either(section, "activation_checkpointing")).lower() == "true":
        found.set("memory.checkpointing", "full")


def _either(section: Given, key: str) -> object:
    """Return the value of the key, or of its old name, which begins with ``fsdp_``."""
    plain, old = section.value(key), section.value(f"fsdp_{key}")
    return plain if plain is not None else old
