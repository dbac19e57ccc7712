"""Tell in which keys a run's recipe has changed since the run last started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .events import read_events


def flat_recipe(value: Any, prefix: str = "") -> dict[str, str]:
    """Return each key of a recipe, sections and key joined by dots, with its value as JSON."""
    if isinstance(value, dict) and value:
        parts = (flat_recipe(one, f"{prefix}{name}.") for name, one in value.items())
        return {key: text for part in parts for key, text in part.items()}
    return {prefix.rstrip("."): json.dumps(value, ensure_ascii=False)}


def plain_recipe(recipe: Mapping[str, Any]) -> dict[str, bool | int | float | str | None]:
    """Return each key of a recipe with its value; a list, which not every tracker takes, as JSON."""
    flat = {key: (json.loads(text), text) for key, text in flat_recipe(dict(recipe)).items()}
    return {key: text if isinstance(value, list | dict) else value for key, (value, text) in flat.items()}


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
