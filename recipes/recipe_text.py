"""Write recipes in TOML for people, each key with the first words of its own help beside it."""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from ..system import visible
from .recipe import Recipe
from .section import sections_of

#: Columns of a line with its comment.
_WIDTH = 110


class Blank(str):
    """Stand in a recipe for a value that the user has to fill in: what belongs there."""


def to_toml(value: Any) -> str:
    """Return plain data as TOML; a table leaves out what has no value."""
    if isinstance(value, Mapping):
        pairs = (f"{_key(key)} = {to_toml(entry)}" for key, entry in value.items() if entry is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    # Strings, numbers and booleans are written alike in JSON, which escapes one control character less.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else to_toml(name)


def comment(text: str) -> str:
    """Return text, which may have come from anywhere, as a comment in one line."""
    return f"# {' '.join(visible(text).split())}".rstrip()


def commented_recipe(
    raw: Mapping[str, Any], head: str = "", remarks: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return a recipe in TOML, sections last; ``head`` becomes its first comment.

    A key has the first words of its help beside it, or its remark: ``remarks`` has them by dotted key.
    """
    lines = [comment(line) for line in head.splitlines()]
    _write_section(lines, "", raw, Recipe, remarks)
    return "\n".join(lines) + "\n"


def _write_section(
    lines: list[str],
    prefix: str,
    table: Mapping[str, Any],
    model: type[BaseModel] | None,
    remarks: Mapping[str, str],
) -> None:
    fields = {} if model is None else {field.alias or key: field for key, field in model.model_fields.items()}
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in table.items() if key not in tables and value is not None}
    if prefix and (plain or not tables):
        lines += ["", f"[{prefix.removesuffix('.')}]"]
    settings = {
        key: f"# FILL IN: {key} = ..." if isinstance(value, Blank) else f"{_key(key)} = {to_toml(value)}"
        for key, value in plain.items()
    }
    column = min(36, max(map(len, settings.values()), default=0)) + 2
    for key, setting in settings.items():
        words = fields[key].description if key in fields else None
        help_text = re.split(r"[;:]|, such|, one of", " ".join((words or "").split()))[0]
        value = plain[key]
        remark = value if isinstance(value, Blank) else remarks.get(f"{prefix}{key}", "")
        line = f"{setting:<{column}}{comment(remark or help_text)}"
        lines.append(line if remark or (help_text and len(line) <= _WIDTH) else setting)
    sections = {} if model is None else sections_of(model)
    for key, inner in tables.items():
        _write_section(lines, f"{prefix}{_key(key)}.", inner, sections.get(key), remarks)
