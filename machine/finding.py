"""Hold what the doctor finds: one line for each check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: ok: nothing to do. warning: works, but slowly or not everywhere. fault: something will fail.
Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """State the result of a check: what was checked, what was found, and the next step if it is not ok."""

    group: str
    check: str
    level: Level
    found: str
    todo: str = ""

    @classmethod
    def unless(cls, group: str, check: str, found: str, todo: str, level: Level = "warning") -> Finding:
        """Return a finding that is ok unless there is something to do."""
        return cls(group, check, level if todo else "ok", found, todo)
