"""Set up LoRA in a run: the adapters, their base, and the first weights of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..checkpoints import Source, StoredAdapter, load_source, read_adapter, read_lora, stored_adapter
from ..models import AdaptedFamily, Family, LoraConfig, adapted
from ..parallel_state import BadInput, ParallelState, initialize
from ..recipes.sections import LoraSection
from ..runs.launch import own_rank

if TYPE_CHECKING:
    from ..models import CausalLM


def plan_adapters(lora: LoraSection, base: Source) -> tuple[AdaptedFamily, StoredAdapter]:
    """Return the family with the recipe's adapters, and what checkpoints will record of their base.

    Its fingerprint is taken on the first rank, and ``agree_on_weights`` tells the others. Raises ``BadInput``
    for targets that the model does not have.
    """
    if lora.init_from is None:
        family = adapted(base.family, recipe_shape(lora))
        family.check(base.model_config, "recipe: lora")
    else:
        _check_alone(lora)
        begun = read_adapter(lora.init_from, base, whole=own_rank() == 0).family
        assert isinstance(begun, AdaptedFamily)
        family = adapted(base.family, _with_dropout(lora, begun.lora))
    return family, stored_adapter(family, base, whole=own_rank() == 0)


def recipe_shape(lora: LoraSection) -> LoraConfig:
    """Return the recipe's adapters, or those that ``lora.init_from`` names."""
    if lora.init_from is None:
        return LoraConfig.model_validate(lora.model_dump(exclude={"init_from"}))
    _check_alone(lora)
    return _with_dropout(lora, read_lora(lora.init_from))


def _check_alone(lora: LoraSection) -> None:
    stated = sorted(lora.model_fields_set - {"init_from", "lora_dropout"})
    if stated:
        expected = "only lora_dropout beside lora.init_from, whose adapters have the other settings"
        raise BadInput("recipe", f"lora.{stated[0]}", expected=expected, found=getattr(lora, stated[0]))


def _with_dropout(lora: LoraSection, begun: LoraConfig) -> LoraConfig:
    """Return the adapters of ``init_from``, with the recipe's dropout if it has one."""
    if "lora_dropout" not in lora.model_fields_set:
        return begun
    return begun.model_copy(update={"lora_dropout": lora.lora_dropout})


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
        load_source(read_adapter(lora.init_from, base, whole=False), model)  # the plan looked at it
        say(f"adapters from {lora.init_from}")
        return
    (stated,) = family.declarations(base.model_config)  # a group of the recipe's may freeze some of them
    initialize(model, seed, among=stated, state=state)
