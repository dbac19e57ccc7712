"""Read the tiny config of a family: the smallest model that has all that the family computes."""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from ..storage.small_files import read_toml
from .zoo import FAMILIES


def tiny_config(model_type: str) -> dict[str, Any]:
    """Return a tiny config.json of this ``model_type``, with few of its fields at their defaults."""
    rows, config = _rows(), FAMILIES[model_type].config
    own: dict[str, Any] = deepcopy({**rows[model_type]})
    left_out = {*config.HARMLESS, *own.pop("absent", ())}
    shared = {
        config.spelled(name): deepcopy(value)
        for name, value in rows["common"].items()
        if name in config.model_fields and name not in left_out
    }
    return {"model_type": model_type, **shared, **dict.fromkeys(own.pop("null", ())), **own}


@cache
def _rows() -> Mapping[str, dict[str, Any]]:
    return read_toml(Path(__file__).with_name("tiny.toml"))
