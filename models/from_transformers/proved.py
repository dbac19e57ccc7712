"""Read which axes tests have proved of which types, and plans of our own, from two tables."""

from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...parallel_state import BadInput
from ...storage.small_files import read_toml
from ...system import whole_number

#: What each axis is called in the table, by the key of a layout.
AXES = ("tensor", "sequence", "pipeline", "context", "expert")
NO_EXPERTS = "the experts of adopted models are not spread over ranks"
_HERE = Path(__file__).parent


@lru_cache
def proved() -> dict[str, Any]:
    """Return the table that ``make any-model`` writes: ``transformers``, its version, and ``types``, each
    with its largest difference by axis, and ``why`` other axes are refused.
    """
    return read_toml(_HERE / "proved.toml")


@lru_cache
def better_plans() -> dict[str, dict[str, str]]:
    """Return, by type, styles to add to transformers' plan, or to put in the place of some of it."""
    return read_toml(_HERE / "plans.toml")


def check_version(kind: str) -> None:
    """Refuse a transformers that is older than the one that tests have proved types with."""
    wanted, installed = proved()["transformers"], version("transformers")
    if _numbers(installed) < _numbers(wanted):
        expected, todo = f"at least {wanted} for {kind}", "pip install -U transformers"
        raise BadInput("transformers", "version", expected=expected, found=installed, todo=todo)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(whole_number(part) or 0 for part in text.split(".")[:2])


def why_refused(kind: str) -> str:
    """Return why a type is refused whole, or nothing."""
    stated = proved()["types"].get(kind)
    if stated is None:
        return f"no test has tried it with transformers {proved()['transformers']}"
    return str(stated.get("refused", ""))


def offered() -> dict[str, tuple[str, ...]]:
    """Return the types that pass, and of each the axes that tests have proved."""
    rows = {kind: row["proved"] for kind, row in proved()["types"].items() if "refused" not in row}
    return {kind: tuple(axis for axis in AXES if axis in gaps) for kind, gaps in rows.items()}


def why_not(kind: str, axis: str) -> str:
    """Return why an axis is not offered for a type of the table, or nothing."""
    stated = proved()["types"][kind]
    unknown = NO_EXPERTS if axis == "expert" else "no test has proved it"
    return "" if axis in stated["proved"] else str(stated.get("why", {}).get(axis, unknown))
