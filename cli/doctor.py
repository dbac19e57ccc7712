"""``trilith doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="folders whose file systems to check too", metavar="FOLDER"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the findings as JSON, to send or to compare")
    ] = False,
) -> None:
    """Check in a minute whether this machine is ready for training.

    The doctor looks at versions, GPUs and their links, memory, cores, limits, file systems and environment
    variables, compiles a small C++ program, and has two ranks add numbers. Each line is ok, a warning
    (something works, but slowly or not everywhere) or a fault (something will fail), and says what to do. It
    checks this machine only, and leaves nothing behind. The exit code is 3 if there is a fault.

    Examples:

        trilith doctor
        trilith doctor /mnt/checkpoints --json
    """
    import json
    from dataclasses import asdict

    from ..bench import diagnose
    from ..parallel_state import BadInput
    from ..runs.console import plain_console
    from .shared.say import say

    for folder in (Path.cwd(), *(folders or ())):  # the first one may have been deleted
        if not folder.is_dir():
            raise BadInput(folder, expected="a folder that exists", found="none")
    console = plain_console()
    with plain_console(stderr=True).status("checking") as status:
        found = diagnose(folders or (), say=lambda group: status.update(f"checking {group}"))
    if as_json:
        say(json.dumps({"findings": [asdict(one) for one in found]}, indent=2))
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Doctor", title_justify="left")
        for column in ("", "check", "found", "what to do"):
            table.add_column(column, overflow="fold")
        colours = {"ok": "green", "warning": "yellow", "fault": "red"}
        for one in found:
            table.add_row(Text(one.level, colours[one.level]), one.check, one.found, one.todo)
        console.print(table)
        counts = {level: sum(one.level == level for one in found) for level in colours}
        console.print(", ".join(f"{count} {level}" for level, count in counts.items()))
    if any(one.level == "fault" for one in found):
        raise typer.Exit(3)
