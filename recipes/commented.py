"""Write a recipe for people: each key with the first words of its own help beside it."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from .recipe import Recipe
from .section import sections_of


def to_toml(value: Any) -> str:
    """Return plain data as TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {to_toml(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    return json.dumps(value)  # strings, numbers and booleans are written alike in both


#: Columns of a line with its comment.
_WIDTH = 110


def commented_recipe(raw: Mapping[str, Any], head: str = "") -> str:
    """Return a recipe in TOML, sections last; ``head`` becomes its first comment."""
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    _write_section(lines, "", raw, Recipe)
    return "\n".join(lines) + "\n"


def _write_section(lines: list[str], name: str, table: Mapping[str, Any], model: type[BaseModel]) -> None:
    sections = sections_of(model)
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping) and sections.get(key)}
    plain = {key: value for key, value in table.items() if key not in inner and value is not None}
    if name and plain:
        lines += ["", f"[{name}]"]
    help_of = {field.alias or key: field.description or "" for key, field in model.model_fields.items()}
    settings = {key: f"{key} = {to_toml(value)}" for key, value in plain.items()}
    column = min(36, max(map(len, settings.values()), default=0)) + 2
    for key, setting in settings.items():
        words = re.split(r"[;:]|, such|, one of", " ".join(help_of.get(key, "").split()))[0]
        line = f"{setting:<{column}}# {words}"
        lines.append(line if words and len(line) <= _WIDTH else setting)
    for key, value in inner.items():
        section = sections[key]
        assert section is not None
        _write_section(lines, f"{name}.{key}" if name else key, value, section)
