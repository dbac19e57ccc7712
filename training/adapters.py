"""LoRA in a run: what is attached, on which base, and where the first weights of either come from."""

from __future__ import annotations

from collections.abc import Callable

from ..checkpoints import Source, StoredAdapter, load_source, read_adapter, stored_adapter
from ..models import AdaptedFamily, CausalLM, Family, LoraConfig, adapted
from ..parallel_state import BadInput, ParallelState, initialize
from .sections import LoraSection


def plan_adapters(lora: LoraSection, base: Source) -> tuple[AdaptedFamily, StoredAdapter]:
    """The family with the recipe's adapters, and what the run's checkpoints will say of their base.

    Raises ``BadInput`` for targets that the model does not have.
    """
    if lora.init_from is None:
        wanted = LoraConfig.model_validate(lora.model_dump(exclude={"init_from"}))
        family = adapted(base.family, wanted)
        family.check(base.model_config, "recipe: lora")
    else:
        family = _as_begun(lora, lora.init_from, base)
    return family, stored_adapter(family, base)


def _as_begun(lora: LoraSection, begun: str, base: Source) -> AdaptedFamily:
    """The adapters of ``init_from``, with the dropout of the recipe if it says one."""
    said = sorted(lora.model_fields_set - {"init_from", "lora_dropout"})
    if said:
        expected = "nothing beside lora.init_from, which says it, but lora_dropout"
        raise BadInput("recipe", f"lora.{said[0]}", expected=expected, found=getattr(lora, said[0]))
    family = read_adapter(begun, base).family
    assert isinstance(family, AdaptedFamily)
    if "lora_dropout" not in lora.model_fields_set:
        return family
    return adapted(base.family, family.lora.model_copy(update={"lora_dropout": lora.lora_dropout}))


def first_adapters(
    lora: LoraSection,
    base: Source,
    family: Family,
    model: CausalLM,
    seed: int,
    *,
    state: ParallelState,
    resuming: bool,
    say: Callable[[str], None],
) -> None:
    """Fill the base, which no checkpoint of the run holds, and for a new run the adapters."""
    load_source(base, model)
    say(f"base weights from {base.path}, frozen")
    if resuming:
        return
    if lora.init_from is not None:
        load_source(read_adapter(lora.init_from, base), model)
        say(f"adapters from {lora.init_from}")
        return
    (stated,) = family.declarations(base.model_config)  # a group of the recipe's may freeze some of them
    initialize(model, seed, among=stated, state=state)
