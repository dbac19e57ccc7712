"""Check a manifest: before it is written, that it can be read back; and that what it states is possible."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from ..parallel_state import BadCheckpoint, BadInput, from_validation
from ..storage.file_names import MANIFEST
from ..storage.files_beside_weights import check_companion
from ..storage.strict_json import shown
from .manifest import Manifest
from .source import Source
from .stated_progress import check_moments, check_progress
from .stored_tensor import check_same_shapes

#: Levels of lists and objects inside one another; readers of JSON give up at some two hundred.
DEEPEST = 100
_TODO = "A checkpoint with it could not be read"


def check_plain(value: object, where: object, key: str) -> None:
    """Refuse data that JSON cannot hold or does not return unchanged; ``BadInput`` names its place."""
    _check_plain(value, where, key, 0)


def _check_plain(value: object, where: object, key: str, depth: int) -> None:
    if depth > DEEPEST:
        short = key if len(key) < 60 else f"{key[:60]}..."
        raise BadInput(where, short, expected=f"at most {DEEPEST} levels", found="more", todo=_TODO)
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise BadInput(where, key, expected="names that are text", found=shown(name), todo=_TODO)
            _check_plain(name, where, f"{key}.{shown(name)}", depth)
            _check_plain(inner, where, f"{key}.{name if name.isprintable() else shown(name)}", depth + 1)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_plain(inner, where, f"{key}[{number}]", depth + 1)
    elif isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise BadInput(where, key, expected="whole characters", found=shown(value), todo=_TODO)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadInput(where, key, expected="a finite number", found=value, todo=_TODO)
    elif isinstance(value, int):
        if value.bit_length() > 1024:
            size = f"one of {value.bit_length():,} bits"
            raise BadInput(where, key, expected="a number of at most 1,024 bits", found=size, todo=_TODO)
    elif value is not None:
        expected = "text, a number, true, false, a list or an object"
        raise BadInput(where, key, expected=expected, found=f"a {type(value).__name__}", todo=_TODO)


def read_back(build: Callable[[], Manifest], output: Path) -> Manifest:
    """Build a manifest for ``output`` and read it back from its bytes: the manifest, if it is the same.

    ``BadInput`` for one that a reader would refuse, or would take for another.
    """
    try:
        manifest = build()
        for companion in manifest.companions:
            check_companion(companion.name, output)
        again = Manifest.parse(manifest.to_bytes(), output)
        again.check(output)
        again.check_place(output)
    except (ValidationError, BadInput) as error:
        bad = error if isinstance(error, BadInput) else from_validation(output, error)
        raise BadInput(output, bad.key, expected=bad.expected, found=bad.found, todo=_TODO) from None
    except (ValueError, TypeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise BadInput(output, expected="what a manifest can hold", found=problem, todo=_TODO) from None
    for name in Manifest.model_fields:
        if getattr(again, name) != getattr(manifest, name):
            problem = "something else when it is read back"
            raise BadInput(output, name, expected="what was written", found=problem, todo=_TODO)
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
        (stated,) = described.declarations()
        if manifest.module is None:  # a module states its own layout and no other
            described.declarations(manifest.layout, split=split)
    except BadInput as bad:
        raise BadCheckpoint(where, bad.key, expected=bad.expected, found=bad.found, todo=bad.todo) from None
    except ValidationError as bad:
        raise from_validation(where, bad, spelled="adapter.lora.{}".format, kind=BadCheckpoint) from None
    wanted = {name: declaration.shape for name, declaration in stated.items()}
    shapes = {n: whole.shape for n, whole in source.catalog.items() if not n.startswith("optimizer.")}
    check_same_shapes(where, wanted, shapes)
    trained = [
        name for name, declaration in stated.items() if not declaration.buffer and name not in manifest.frozen
    ]
    check_progress(manifest, where)
    check_moments(manifest, trained, where)
