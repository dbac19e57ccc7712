"""Read the tiny config of a family: the smallest model that has all that the family computes."""

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from ..storage.small_files import read_json


def tiny_config(model_type: str) -> dict[str, Any]:
    """Return a tiny config.json of this ``model_type``, with few of its fields at their defaults."""
    return deepcopy(_tiny_configs()[model_type])


@cache
def _tiny_configs() -> Mapping[str, dict[str, Any]]:
    configs: Mapping[str, dict[str, Any]] = read_json(Path(__file__).with_name("tiny.json"))
    return configs
