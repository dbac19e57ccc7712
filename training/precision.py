"""Define the data types in which a step computes, sums gradients, and keeps its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..layers import use_float8
from ..parallel_state import BadInput, ParallelState
from ..parallel_state.engine import accelerator
from ..recipes.recipe import Recipe

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True, slots=True)
class Precision:
    """State three dtypes: ``master`` of weights and moments, ``compute`` of forward and backward, and
    ``reduce`` of the sums of gradients over micro-batches and ranks.
    """

    master: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    @property
    def casts(self) -> bool:
        """Tell whether the three differ."""
        return not self.master == self.compute == self.reduce

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """Return FSDP2's policy, which casts weights on all-gather and gradients before they are summed."""
        from torch.distributed.fsdp import MixedPrecisionPolicy  # half a second

        return MixedPrecisionPolicy(
            param_dtype=self.compute if self.compute != self.master else None,
            reduce_dtype=self.reduce if self.reduce != self.compute else None,
            cast_forward_inputs=False,
        )


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's activations: what ``shard_over_data`` was told, or its parameters'."""
    if (precision := _stated_precision(model)) is not None:
        return precision.compute
    floating = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next(floating, torch.float32)


def reduce_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype in which partial gradients are summed; ``None``: that of the gradients."""
    precision = _stated_precision(model)
    return None if precision is None else torch.promote_types(precision.master, precision.reduce)


def _stated_precision(model: nn.Module) -> Precision | None:
    precision = model.__dict__.get("precision")
    return precision if isinstance(precision, Precision) else None


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
