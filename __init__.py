"""Megatron-style training for PyTorch: one model, any layout.

The names below are those that the first pages of the docs use. Each comes from a room's ``__init__.py``. A
room is imported when one of its names is first used, so ``import trilith`` is quick and does not import
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoints import convert, describe_module, load, newest_of_run, save, verify
    from .generation import generate
    from .layers import ColumnParallelLinear, RowParallelLinear
    from .models import CausalLM, family_of
    from .parallel_state import Layout, ParallelState, clip_gradients, finalize_gradients, initialize
    from .recipes import Recipe, load_recipe
    from .testing import assert_layout_invariant, run_parallel
    from .training import (
        FunctionLoss,
        Precision,
        Step,
        TokenLoss,
        Trainer,
        Update,
        make_adamw,
        run,
        shard_batch,
        shard_over_data,
    )

__all__ = [
    "CausalLM",
    "ColumnParallelLinear",
    "FunctionLoss",
    "Layout",
    "ParallelState",
    "Precision",
    "Recipe",
    "RowParallelLinear",
    "Step",
    "TokenLoss",
    "Trainer",
    "Update",
    "assert_layout_invariant",
    "clip_gradients",
    "convert",
    "describe_module",
    "family_of",
    "finalize_gradients",
    "generate",
    "initialize",
    "load",
    "load_recipe",
    "make_adamw",
    "newest_of_run",
    "run",
    "run_parallel",
    "save",
    "shard_batch",
    "shard_over_data",
    "verify",
]

#: The rooms that are searched for a name, lower floors first: a higher room imports the lower ones anyway.
_DOORS = (
    *("parallel_state", "ranks", "layers", "models", "checkpoints"),
    *("generation", "recipes", "training", "testing"),
)


def __getattr__(name: str) -> Any:
    for room in _DOORS if name in __all__ else ():
        door = import_module(f".{room}", __name__)
        if hasattr(door, name):
            return getattr(door, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
