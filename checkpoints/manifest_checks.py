"""Check a manifest: before it is written, that it can be read back; and that what it states is possible."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..parallel_state import BadCheckpoint, BadInput, Layout, from_validation, require
from ..storage.file_names import MANIFEST
from ..storage.strict_json import DEEPEST, Count, StrictRecord, shown
from .manifest import Manifest
from .optimizer_state import moment_name
from .source import Source
from .stored_tensor import check_same_shapes

_TODO = "A checkpoint with it could not be read"


def check_plain(value: object, where: object, key: str, depth: int = 0) -> None:
    """Refuse data that JSON cannot hold or does not return unchanged; ``BadInput`` names its place.

    ``depth``: the levels of lists and objects around it.
    """
    short = key if len(key) < 60 else f"{key[:60]}..."
    require(depth <= DEEPEST, where, short, f"at most {DEEPEST} levels", "more", _TODO)
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise BadInput(where, key, expected="names that are text", found=shown(name), todo=_TODO)
            check_plain(name, where, f"{key}.{shown(name)}", depth)
            check_plain(inner, where, f"{key}.{name if name.isprintable() else shown(name)}", depth + 1)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            check_plain(inner, where, f"{key}[{number}]", depth + 1)
    elif isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise BadInput(where, key, expected="whole characters", found=shown(value), todo=_TODO)
    elif isinstance(value, float):
        require(math.isfinite(value), where, key, "a finite number", value, _TODO)
    elif isinstance(value, int):
        size = f"one of {value.bit_length():,} bits"
        require(value.bit_length() <= 1024, where, key, "a number of at most 1,024 bits", size, _TODO)
    elif value is not None:
        expected = "text, a number, true, false, a list or an object"
        raise BadInput(where, key, expected=expected, found=f"a {type(value).__name__}", todo=_TODO)


def read_back(build: Callable[[], Manifest], output: Path) -> Manifest:
    """Build a manifest for ``output`` and read it back from its bytes: the manifest, if it is the same.

    ``BadInput`` for one that a reader would refuse, or would take for another.
    """
    try:
        manifest = build()
        manifest.accepted_bytes(output)
    except (ValidationError, BadInput) as error:
        bad = error if isinstance(error, BadInput) else from_validation(output, error)
        raise BadInput(output, bad.key, expected=bad.expected, found=bad.found, todo=_TODO) from None
    except (ValueError, TypeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise BadInput(output, expected="what a manifest can hold", found=problem, todo=_TODO) from None
    return manifest


def check_model(source: Source) -> None:
    """Refuse a checkpoint whose stated model does not exist, does not fit its layout, or has other tensors,
    and one whose progress cannot be.
    """
    manifest, where = source.manifest, source.path / MANIFEST
    assert manifest is not None, source.path
    stated_split = manifest.state.get("split")
    split = [n for n in stated_split if isinstance(n, int)] if isinstance(stated_split, list) else None
    try:
        described = source.described
        (declared,) = described.declarations()
        if manifest.module is None:  # a module states its own layout and no other
            described.declarations(manifest.layout, split=split)
    except BadInput as bad:
        raise BadCheckpoint(where, bad.key, expected=bad.expected, found=bad.found, todo=bad.todo) from None
    except ValidationError as bad:
        raise from_validation(where, bad, spelled="adapter.lora.{}".format, kind=BadCheckpoint) from None
    shapes = {name: declaration.shape for name, declaration in declared.items()}
    check_same_shapes(where, shapes, manifest.shapes())
    check_progress(manifest, where)
    shapes = {
        moment_name(moment, name): manifest.tensors[name].shape
        for moment, without in manifest.moments.items()
        for name, declaration in declared.items()
        if not declaration.buffer and name not in without
    }
    todo = f"The checkpoint is one of kind {manifest.kind!r}"
    check_same_shapes(where, shapes, manifest.shapes(moments=True), todo=todo)


#: More updates than any run makes.
_MOST_UPDATES = 1 << 53
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class Progress:
    """State how far a run is: ``step``, the number of steps done, and the ``layout`` of the last.

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
    memory_numbers = manifest.state.get("memory")
    if memory_numbers is None:
        return
    try:
        memory = _Memory.model_validate_json(json.dumps(memory_numbers))
    except ValidationError as error:
        raise from_validation(where, error, spelled="state.memory.{}".format, kind=BadCheckpoint) from None
    skipped = None if memory.skipped is None else sum(memory.skipped.values())
    if skipped is not None and memory.updates + skipped != manifest.step:
        expected = f"as many updates and skipped steps as steps, {manifest.step:,}"
        raise BadCheckpoint(
            where, "state.memory", expected=expected, found=f"{memory.updates:,} and {skipped:,}"
        )
    for name, count in memory.updates_of.items():
        if count > memory.updates or name not in manifest.tensors:
            expected = f"tensors with at most {memory.updates:,} updates"
            named_count = f"{shown(name)} with {count:,}"
            raise BadCheckpoint(where, "state.memory.updates_of", expected=expected, found=named_count)


def check_same_model(where: object, other: Manifest, manifest: Manifest) -> None:
    """Refuse a place that holds a checkpoint of a model other than the manifest's.

    Retention would count it among this model's checkpoints, and delete it.
    """
    todo = "It is a checkpoint of another model than the one to be saved: choose another folder"
    check_same_shapes(where, manifest.shapes(), other.shapes(), todo=todo, kind=BadInput)
