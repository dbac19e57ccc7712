"""Set up LoRA in a run: the adapters, their base, and the first weights of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..checkpoints import Source, StoredAdapter, load_source, read_adapter, read_lora, stored_adapter
from ..models import AdaptedFamily, LoraConfig, adapted
from ..parallel_state import BadInput, initialize, require
from ..recipes.sections import LoraSection
from ..runs.launch import own_rank

if TYPE_CHECKING:
    from .trainer import Trainer


def plan_adapters(lora: LoraSection, base: Source) -> tuple[AdaptedFamily, StoredAdapter]:
    """Return the family with the recipe's adapters, and what checkpoints will record of their base.

    Its fingerprint is taken on the first rank, and ``agree_on_weights`` tells the others. Raises ``BadInput``
    for targets that the model does not have.
    """
    adapter_family = adapted(base.family, recipe_shape(lora, base))
    if lora.init_from is None:
        adapter_family.check(base.model_config, "recipe: lora")
    family, idle = adapter_family.of_trained(base.model_config)
    if lora.init_from is None and idle:
        family.check(base.model_config, "recipe: lora")
    elif lora.init_from is not None:
        expected = "adapters of modules that a loss of tokens reads"
        todo = "`trilith merge-lora` adds such adapters to the weights"
        require(not idle, "recipe", "lora.init_from", expected, idle and idle[0], todo)
    return family, stored_adapter(family, base, whole=own_rank() == 0)


def recipe_shape(lora: LoraSection, base: Source | None = None) -> LoraConfig:
    """Return the recipe's adapters, or those that ``lora.init_from`` names, with the recipe's dropout if it
    has one. ``base``: the weights that they must fit, if these are there.
    """
    if lora.init_from is None:
        return LoraConfig.model_validate(lora.model_dump(exclude={"init_from"}))
    if keys := sorted(lora.model_fields_set - {"init_from", "lora_dropout"}):
        expected = "only lora_dropout beside lora.init_from, whose adapters have the other settings"
        raise BadInput("recipe", f"lora.{keys[0]}", expected=expected, found=getattr(lora, keys[0]))
    if base is None:
        begun = read_lora(lora.init_from)
    else:
        family = read_adapter(lora.init_from, base, whole=own_rank() == 0).family
        assert isinstance(family, AdaptedFamily)
        begun = family.lora
    return begun.model_copy(update=lora.model_dump(include={"lora_dropout"} & lora.model_fields_set))


def first_adapters(trainer: Trainer, *, resuming: bool) -> None:
    """Fill the base, which no checkpoint of the run holds, and for a new run the adapters."""
    recipe, plan, model, say = trainer.recipe, trainer.plan, trainer.model, trainer.terminal.say
    lora, base = recipe.lora, plan.source
    assert lora is not None and base is not None
    load_source(base, model)
    model.__dict__["adapter"] = plan.adapter  # so a checkpoint of adapters for another base is refused
    say(f"base weights from {base.path}, frozen")
    if resuming:
        return
    if lora.init_from is not None:
        load_source(read_adapter(lora.init_from, base, whole=False), model)  # the plan looked at it
        say(f"adapters from {lora.init_from}")
        return
    # A group of the recipe's may freeze some of them.
    (declared,) = plan.family.declarations(base.model_config)
    initialize(model, recipe.seed, among=declared, state=trainer.state)
