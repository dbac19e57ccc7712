"""Open a file in which ``torch.save`` wrote a table of tensors, as a safetensors file is opened."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ...parallel_state import BadInput
from ..safetensors_header import MAX_TENSORS
from ..strict_json import shown
from .archive import TorchArchive
from .view import View
from .view_file import ViewFile

#: Levels of dicts inside one another, such as a trainer's ``{"model": {...}}``.
_DEEPEST = 8
_MOST = MAX_TENSORS


def open_state_dict(path: Path) -> ViewFile:
    """Open ``path``; its tensors have the names that they have in the saved dict, joined with a dot where
    dicts lie inside one another. What is no tensor is left out. ``BadInput`` if there is no tensor.
    """
    archive = TorchArchive.open(path)
    file = ViewFile.of(path)
    file.know(archive.entries)
    for name, view in tensors_in(archive.value, path):
        file.add(view, name)
    if not file.tensors:
        raise BadInput(
            path, expected="a dict of tensors", found=f"a {type(archive.value).__name__} without any"
        )
    return file


def tensors_in(value: object, where: object) -> Iterator[tuple[str, View]]:
    """Yield each tensor in dicts inside one another, with its dotted name.

    ``BadInput`` for a name twice, and for more dicts and tensors than a model has: dicts may be shared, so
    that a small file can describe very many.
    """
    level: list[tuple[str, object]] = [("", value)]
    seen: set[str] = set()
    met = 0
    for _ in range(_DEEPEST):
        inside = [
            (f"{prefix}{key}", child)
            for prefix, table in level
            if isinstance(table, dict)
            for key, child in islice(table.items(), _MOST - met)
            if isinstance(key, str | int) and isinstance(child, View | dict)
        ]
        met += len(inside)
        if met >= _MOST:
            raise BadInput(where, expected=f"at most {_MOST:,} tensors", found="more")
        for name, child in inside:
            if isinstance(child, View):
                if name in seen or not name.isprintable():
                    raise BadInput(where, shown(name), expected="a printable name, once", found="another")
                seen.add(name)
                yield name, child
        level = [(f"{name}.", child) for name, child in inside if isinstance(child, dict)]
