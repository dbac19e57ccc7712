"""Set in a model that is made what the recipe says of it: what is frozen, its attention, its products."""

from collections.abc import Mapping

from torch import nn

from ..layers import set_attention_backend, use_float8
from ..parallel_state import BadInput, ParallelState
from ..parallel_state.engine import accelerator
from ..recipes.optimizer_sections import ParameterGroup
from ..recipes.recipe import Recipe
from .parameter_groups import freeze


def set_up_own(model: nn.Module, recipe: Recipe, groups: Mapping[str, ParameterGroup]) -> None:
    """Freeze what the recipe's groups say, and choose the attention, of a user's module; in place."""
    freeze(model, groups)
    set_attention_backend(model, recipe.attention_backend)


def multiply_in_float8(model: nn.Module, recipe: Recipe, state: ParallelState) -> list[str]:
    """Let the blocks' linears multiply in float8, in place; return the names of the weights that do not fit.

    Raises ``BadInput`` for a GPU that has no float8.
    """
    scaling, device = recipe.float8_scaling or "tensorwise", state.device
    if accelerator.is_accelerator(device):
        needed, capability = (9, 0) if scaling == "rowwise" else (8, 9), accelerator.capability(device)
        if capability < needed:
            expected = "a GPU of compute capability {}.{} or later with float8".format(*needed)
            raise BadInput("recipe", "compute", expected=expected, found="{}.{}".format(*capability))
    return use_float8(model, scaling)
