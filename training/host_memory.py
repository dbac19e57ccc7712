"""Refuse ranks that cannot fit in this machine's memory: Linux would kill them later, without a word."""

from math import prod

from ..models import AdaptedFamily
from ..parallel_state import BadInput, Coordinates, Declaration, Layout, dtype_named
from ..recipes.recipe import Recipe
from ..system import counted
from ..system.machine import memory_available
from .run_plan import Plan


def check_host_memory(recipe: Recipe, planned: Plan) -> None:
    """Refuse a run of ranks that are all on this host if it cannot hold their weights, gradients and AdamW's
    moments: the least that a step needs, for activations come on top. Free swap counts as memory.
    """
    if recipe.device != "cpu" and not recipe.memory.offload:
        return
    available, layout = memory_available(swap=True), recipe.layout
    family = planned.family.base if isinstance(planned.family, AdaptedFamily) else planned.family
    stages = family.declarations(planned.config, layout, split=planned.split)
    declared = [declaration for stage in stages for declaration in stage.values()]
    itemsize = dtype_named(recipe.dtype).itemsize
    copies = 4 if recipe.lora is None and not planned.groups else 1  # of LoRA frozen weights alone
    whole = sum(prod(declaration.held_shape(layout)) for declaration in declared)
    if available is None or whole * layout.world * copies * itemsize <= available:
        return  # even if each rank had all of it
    first_stage = [at for at in map(layout.coordinates, range(layout.world)) if at.pipeline == 0]
    need = itemsize * sum(
        _numbers(declaration, layout, at, copies) for declaration in declared for at in first_stage
    )
    if need > available:
        raise BadInput(
            "this machine",
            "memory",
            expected=f"at least {need / 1e9:,.1f} GB for {counted(layout.world, 'rank')}: weights"
            + (", gradients and moments" if copies > 1 else ""),
            found=f"{available / 1e9:,.1f} GB free",
            todo="Train on GPUs (device) or a smaller model"
            + (", or share these over layout.data with layout.zero = 3" if layout.zero < 3 else ""),
        )


def _numbers(declaration: Declaration, layout: Layout, at: Coordinates, copies: int) -> int:
    """Return how many numbers a rank holds of a parameter and, with 4 ``copies``, of what a step adds."""
    box, shard = declaration.box(layout, at).size, declaration.shard_box(layout, at).size
    weights = shard if layout.zero == 3 else box
    return weights if copies == 1 or declaration.buffer else weights + 3 * shard
