"""Write plain data as TOML."""

import json
from typing import Any


def to_toml(value: Any) -> str:
    """Return plain data as TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {to_toml(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    return json.dumps(value)  # strings, numbers and booleans are written alike in both
