"""Tell in which keys a run's recipe has changed since the run last started."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .events import read_events


def flat_recipe(recipe: Any) -> dict[str, str]:
    """Return each key of a recipe, sections and key joined by dots, with its value as JSON."""
    return {key: json.dumps(leaf, ensure_ascii=False) for key, leaf in _flat(recipe, "").items()}


def _flat(node: Any, prefix: str) -> dict[str, Any]:
    if isinstance(node, dict) and node:
        parts = (_flat(child, f"{prefix}{name}.") for name, child in node.items())
        return {key: leaf for part in parts for key, leaf in part.items()}
    return {prefix.rstrip("."): node}


def plain_recipe(recipe: Mapping[str, Any]) -> dict[str, bool | int | float | str | None]:
    """Return each key of a recipe with its value; a list, which not every tracker takes, as JSON."""
    return {
        key: json.dumps(value) if isinstance(value, list | dict) else value
        for key, value in _flat(dict(recipe), "").items()
    }


def recipe_changes(events: Path, recipe: Mapping[str, Any]) -> list[str]:
    """Return a text such as ``compute: "float32", now "bfloat16"`` for each key that differs from the recipe
    in the run's last event that has one.
    """
    before = [event["recipe"] for event in read_events(events) if isinstance(event.get("recipe"), dict)]
    if not before:
        return []
    then, now = flat_recipe(before[-1]), flat_recipe(dict(recipe))
    return [
        f"{key}: {then.get(key, 'null')}, now {now.get(key, 'null')}"
        for key in dict.fromkeys([*now, *then])
        if then.get(key, "null") != now.get(key, "null")
    ]
