"""State what all checkpoints of a run share, and what identifies the run: the order of its samples and the
user's own code. Refuse to resume from a checkpoint, or to start with a rank, whose identity differs.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoints import Contents, Described, Progress, contents_of
from ..data.batches import GlobalBatches
from ..data.rows import other_rows
from ..parallel_state import BadInput, ParallelState, require
from ..parallel_state.collective_errors import together
from ..recipes.recipe import Recipe
from .run_plan import RunPlan


def identity_of_run(recipe: Recipe, plan: RunPlan) -> dict[str, Any]:
    """Return what determines the order of samples, besides the step, and what a user's own code is."""
    own: Mapping[str, str] = {} if plan.own is None else plan.own.identity
    return {
        **own,
        "sequence_length": recipe.data.sequence_length,
        "global_batch": recipe.data.global_batch,
        "seed": recipe.seed,
        "fingerprint": plan.batches.fingerprint,
    }


def check_progress(
    recipe: Recipe, plan: RunPlan, newest: Path, progress: Progress, *, say: Callable[[str], None]
) -> None:
    """Refuse to resume from ``newest`` with other samples, with samples in another order, or with other
    arguments of a user's module; say what else of his own code has changed.
    """
    todo = "Ask for more steps, or start a new run in another folder (out)"
    expected = f"at least {progress.step}, the step of {newest}"
    require(progress.step <= recipe.steps, "recipe", "steps", expected, recipe.steps, todo)
    if not progress.data:  # of another project, converted
        say(f"{newest} states no data: the samples are those of step {progress.step} here")
        return
    own: Mapping[str, str] = {} if plan.own is None else plan.own.identity
    for key, value in identity_of_run(recipe, plan).items():
        stored = progress.data.get(key)
        if stored == value or (key in own and stored is None):  # of a run before this was kept
            continue
        if key == "model.arguments":
            todo = "A resumed run cannot change its model: start a new run with model.init_from"
            expected = f"{stored}, with which {newest} was trained"
            raise BadInput("recipe", key, expected=expected, found=value, todo=todo)
        if key in own:
            say(f"{key}: {value}; up to step {progress.step} it was {stored}")
        else:
            name, expected, actual = _recipe_key(recipe, key), f"{stored}", f"{value}"
            if key == "fingerprint" and isinstance(plan.batches, GlobalBatches):
                name, expected, actual = other_rows(expected, actual)

                paths = ", ".join(str(file.path) for file in plan.batches.files)
                actual += f", of {paths}" * (name == "data.tokens")
            raise BadInput(
                newest, name,
                expected="what the run began with, which is not stated" if stored is None else expected,
                found=actual,
                todo="Resume with the data that the run began with, or start a new run with model.init_from",
            )  # fmt: skip


def _recipe_key(recipe: Recipe, key: str) -> str:
    """Return the key of the recipe that decides a fact of ``identity_of_run``."""
    section, _, fact = key.rpartition(".")
    section = section or "data"
    if fact == "fingerprint":
        return f"{section}.{'tokens' if recipe.data.module is None else 'module'}"
    return f"{section}.{fact}" if fact in type(recipe.data).model_fields else key


def check_ranks_alike(recipe: Recipe, plan: RunPlan, state: ParallelState) -> None:
    """Refuse ranks with different copies of the data or of the user's own code. Collective."""
    facts = identity_of_run(recipe, plan)
    if plan.held_out is not None:
        facts["evaluation.fingerprint"] = plan.held_out.batches.fingerprint
    first, *others = together(lambda: facts, state)
    for rank, other in enumerate(others, start=1):
        for key, value in first.items():
            require(
                other.get(key) == value, "recipe", _recipe_key(recipe, key),
                f"{value}, the same on every rank", f"rank {rank}: {other.get(key, 'not set')}",
                "Copy the files of one host to all, or name them in a folder that all share",
            )  # fmt: skip


def contents_of_run(plan: RunPlan, model: nn.Module, state: ParallelState) -> Contents:
    """Return what the checkpoints of a run have in common. Collective for a user's module."""
    if plan.own is not None:
        return replace(contents_of(model, None, state), companions=plan.companions)
    frozen = {name for name, group in plan.groups.items() if group.freeze}
    if plan.adapter is None:
        frozen |= plan.family.untrained(plan.config)
    return Contents(
        Described(plan.family, plan.config),
        plan.hf_config,
        plan.split,
        plan.companions,
        adapter=plan.adapter,
        frozen=frozenset(frozen),
    )
