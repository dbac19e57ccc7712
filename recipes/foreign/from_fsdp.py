"""Translate the FSDP settings of Hugging Face TrainingArguments to a recipe."""

from __future__ import annotations

from .translation import Given, Translation, is_off

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
