"""Check what a manifest states about a run's progress: its step, its updates, and which moments it has."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..parallel_state import BadCheckpoint, from_validation
from ..storage.records import Count, StrictRecord
from ..storage.strict_json import shown
from .manifest import Manifest
from .moments import MOMENTS, moment_name

#: More updates than any run makes.
_MOST_UPDATES = 1 << 53
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _LossScale(StrictRecord):
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    good: Count


class _Spikes(StrictRecord):
    losses: tuple[Finite, ...]
    norms: tuple[Finite, ...]


class _Memory(BaseModel):
    """Define what ``training.Update`` and ``together_updates`` remember."""

    model_config = ConfigDict(strict=True)

    updates: Annotated[int, Field(ge=0, le=_MOST_UPDATES)] = 0
    updates_of: dict[str, Count] = {}
    skipped: dict[Literal["overflow", "spike"], Count] | None = None
    loss_scale: _LossScale | None = None
    spikes: _Spikes | None = None


def check_progress(manifest: Manifest, where: object) -> None:
    """Refuse a training checkpoint without a step, and numbers of updates that no run can have made."""
    if manifest.kind != "training":
        return
    if manifest.step is None:
        raise BadCheckpoint(where, "step", expected="the step of a training run", found="none")
    stated = manifest.state.get("memory")
    if stated is None:
        return
    try:
        memory = _Memory.model_validate_json(json.dumps(stated))
    except ValidationError as error:
        raise from_validation(where, error, spelled="state.memory.{}".format, kind=BadCheckpoint) from None
    if memory.skipped is not None and memory.updates + sum(memory.skipped.values()) != manifest.step:
        raise BadCheckpoint(
            where,
            "state.memory",
            expected=f"as many updates and skipped steps as steps, {manifest.step:,}",
            found=f"{memory.updates:,} and {sum(memory.skipped.values()):,}",
        )
    for name, count in memory.updates_of.items():
        if count > memory.updates or name not in manifest.tensors:
            expected = f"tensors with at most {memory.updates:,} updates"
            found = f"{shown(name)} with {count:,}"
            raise BadCheckpoint(where, "state.memory.updates_of", expected=expected, found=found)


def check_moments(manifest: Manifest, trained: Collection[str], where: object) -> None:
    """Refuse moments that a checkpoint of its kind cannot have: ``trained`` names the weights that do have
    them, if it is one of training.
    """
    wanted = {
        moment_name(moment, name): manifest.tensors[name].shape
        for moment in MOMENTS
        for name in (trained if manifest.kind == "training" else ())
    }
    found = {name: one.shape for name, one in manifest.tensors.items() if name.startswith("optimizer.")}
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            expected, there = (
                "no such tensor" if one is None else list(one) for one in (wanted.get(name), found.get(name))
            )
            todo = f"The checkpoint is one of kind {manifest.kind!r}"
            raise BadCheckpoint(where, shown(name), expected=expected, found=there, todo=todo)
