"""State how far a run is, and check what a manifest says of it: its step, its updates, and its moments."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..parallel_state import BadCheckpoint, Layout, from_validation
from ..storage.records import Count, StrictRecord
from ..storage.strict_json import shown
from .manifest import Manifest
from .optimizer_state import moment_name
from .stored_tensor import check_same_shapes

#: More updates than any run makes.
_MOST_UPDATES = 1 << 53
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class Progress:
    """State how far a run is: ``step``, the number of steps done, and the ``layout`` that did the last of
    them.

    ``data``: plain data that fixes the order of the samples. ``memory``: plain data of the training loop
    (``Update.remember``). ``extra``: the user's own plain data.
    """

    step: int
    layout: Layout
    data: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    extra: Any = None


class _LossScale(StrictRecord):
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    good: Count


class _Spikes(StrictRecord):
    losses: tuple[Finite, ...]
    norms: tuple[Finite, ...]


class _Memory(BaseModel):
    """Define what ``training.Update`` remembers."""

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
            named_count = f"{shown(name)} with {count:,}"
            raise BadCheckpoint(where, "state.memory.updates_of", expected=expected, found=named_count)


def check_moments(manifest: Manifest, trained: Collection[str], where: object) -> None:
    """Refuse moments that a checkpoint of its kind cannot have: ``trained`` names the weights that do have
    them, if it is one of training.
    """
    wanted = {
        moment_name(moment, name): manifest.tensors[name].shape
        for moment, without in manifest.moments.items()
        for name in trained
        if name not in without
    }
    shapes = {
        name: tensor.shape for name, tensor in manifest.tensors.items() if name.startswith("optimizer.")
    }
    check_same_shapes(where, wanted, shapes, todo=f"The checkpoint is one of kind {manifest.kind!r}")
