"""Run every check of the doctor, one after the other."""

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from ...system import refusal_of
from ..facts import Finding
from .devices import check_devices, check_ranks
from .disk import check_files
from .host import check_limits, check_software, check_variables

#: Groups of checks: the title, and the function that makes the findings from the folders to look at.
GROUPS: tuple[tuple[str, Callable[[list[Path]], Iterable[Finding]]], ...] = (
    ("software", lambda folders: check_software()),
    ("devices", lambda folders: check_devices()),
    ("machine", lambda folders: check_limits()),
    ("environment", lambda folders: check_variables()),
    ("files", check_files),
    ("ranks", lambda folders: check_ranks()),
)


def diagnose(folders: Iterable[Path] = (), *, say: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Check this machine for what training needs; return a finding for each check.

    ``folders``: folders besides the working directory, torch's cache and the temporary folder whose file
    systems to check. ``say`` is told each group of checks before it runs. A check that itself fails is a
    finding, so the others still run.
    """
    findings: list[Finding] = []
    for group, check in GROUPS:
        say(group)
        try:
            findings += check([*folders])
        except Exception as error:
            if (refusal := refusal_of(error)) is not None:
                findings.append(Finding(group, "the check itself", "fault", refusal.reason, refusal.todo))
                continue
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            todo = "Please send this line to the developers"
            findings.append(Finding(group, "the check itself", "warning", f"could not be made: {text}", todo))
    return findings
