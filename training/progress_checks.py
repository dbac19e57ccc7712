"""State what a run's checkpoints have in common and what fixes the order of its samples, and refuse a
checkpoint of another order.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoints import Contents, Described, Progress, contents_of
from ..parallel_state import BadInput, ParallelState
from ..recipes.recipe import Recipe
from .run_plan import RunPlan


def sample_order(recipe: Recipe, plan: RunPlan) -> dict[str, Any]:
    """Return what determines the order of samples, besides the step."""
    return {
        "fingerprint": plan.batches.fingerprint,
        "sequence_length": recipe.data.sequence_length,
        "global_batch": recipe.data.global_batch,
        "seed": recipe.seed,
    }


def check_progress(
    recipe: Recipe, plan: RunPlan, newest: Path, progress: Progress, *, say: Callable[[str], None]
) -> None:
    """Refuse to resume from ``newest`` with other samples, or with samples in another order."""
    if progress.step > recipe.steps:
        raise BadInput(
            "recipe", "steps", expected=f"at least {progress.step}, the step of {newest}",
            found=recipe.steps,
            todo="Ask for more steps, or start a new run in another folder (out)",
        )  # fmt: skip
    if not progress.data:  # of another project, converted
        say(f"{newest} states no data: the samples are those of step {progress.step} here")
        return
    for key, value in sample_order(recipe, plan).items():
        if progress.data.get(key) != value:
            raise BadInput(
                newest, f"data.{key}", expected=progress.data.get(key), found=value,
                todo="Resume with the data that the run began with, or start a new run with init_from",
            )  # fmt: skip


def contents_of_run(plan: RunPlan, model: nn.Module, state: ParallelState) -> Contents:
    """Return what the checkpoints of a run have in common. Collective for a user's module."""
    if plan.own is not None:
        return replace(contents_of(model, None, state), companions=plan.companions)
    return Contents(
        Described(plan.family, plan.config),
        plan.hf_config,
        plan.split,
        plan.companions,
        adapter=plan.adapter,
        frozen=frozenset(name for name, group in plan.groups.items() if group.freeze),
    )
