"""Read which axes tests have proved of which types, and plans of our own, from two tables."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...parallel_state import BadInput

#: What each axis is called in the table, by the key of a layout.
AXES = ("tensor", "sequence", "pipeline", "context", "expert")
_HERE = Path(__file__).parent


@lru_cache
def proved() -> dict[str, Any]:
    """Return the table that ``make models`` writes: ``transformers``, its version, and ``types``."""
    return tomllib.loads((_HERE / "proved.toml").read_text(encoding="utf-8"))


@lru_cache
def better_plans() -> dict[str, dict[str, str]]:
    """Return, by type, styles to add to transformers' plan, or to put in the place of some of it."""
    return tomllib.loads((_HERE / "plans.toml").read_text(encoding="utf-8"))


def check_version(kind: str) -> None:
    """Refuse a transformers that is older than the one that tests have proved types with."""
    wanted, found = proved()["transformers"], version("transformers")
    if _numbers(found) < _numbers(wanted):
        expected, todo = f"at least {wanted} for {kind}", "pip install -U transformers"
        raise BadInput("transformers", "version", expected=expected, found=found, todo=todo)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def why_refused(kind: str) -> str:
    """Return why a type is refused whole, or nothing."""
    return str(proved()["types"].get(kind, {}).get("refused", ""))


def why_not(kind: str, axis: str) -> str:
    """Return why an axis is not offered for a type, or nothing."""
    stated = proved()["types"].get(kind)
    if stated is None:
        return f"no test has tried it: `make models` tries types of transformers {proved()['transformers']}"
    if axis in stated["axes"]:
        return ""
    return str(stated.get("why", {}).get(axis, "no test has proved it"))
