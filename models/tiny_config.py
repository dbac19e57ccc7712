"""Read the tiny config of a family: the smallest model that has all that the family computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..storage.small_files import read_json

_FOLDER = Path(__file__).with_name("tiny")


def tiny_config(model_type: str) -> dict[str, Any]:
    """Return a tiny config.json of this ``model_type``, with few of its fields at their defaults."""
    raw: dict[str, Any] = read_json(_FOLDER / f"{model_type}.json")
    return raw
