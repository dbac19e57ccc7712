"""``trilith status RUN``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..shared.say import say

#: Exit code with --exit-code while ranks still run.
STILL_RUNNING = 1


def status(
    run: Annotated[Path, typer.Argument(help="folder of a run: the recipe's key out", metavar="RUN")],
    since: Annotated[
        Path | None,
        typer.Option(help="file on the same disk; starts before it was last changed do not count"),
    ] = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="end with the run's exit code, or with 1 while it runs")
    ] = False,
) -> None:
    """Say how the last start of a run ended, or how far it is.

    torchrun ends with 1 whatever its ranks ended with. A job's script learns here what to do next: 0 the run
    is finished, 75 it has saved and the same command goes on, 2 its input is bad, 3 a rank failed or was
    lost, 4 a checkpoint is damaged.

    Examples:

        trilith status run
        trilith status run --since run/job-started --exit-code
    """
    from ...runs.outcome import outcome

    found = outcome(run, since=since)
    say(found.text)
    if exit_code:
        raise typer.Exit(STILL_RUNNING if found.code is None else found.code)
