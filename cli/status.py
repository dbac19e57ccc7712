"""``trilith status RUN``."""

from pathlib import Path
from typing import Annotated

import typer

from ..system import counted
from .shared.parameters import There
from .shared.say import say

#: Exit code with --exit-code while ranks still run.
STILL_RUNNING = 1


def status(
    run: Annotated[Path, There, "folder of a run: the recipe's key out"],
    *,
    since: Annotated[Path | None, "ignore starts older than this file, which is on the same disk"] = None,
    exit_code: Annotated[bool, "end with the run's exit code, or with 1 while it runs"] = False,
    why: Annotated[bool, "say which rank waited for which, and in which collective"] = False,
) -> None:
    """Say how the last start of a run ended, or how far it has come.

    torchrun ends with code 1, whatever codes its ranks ended with. With --exit-code this command ends with
    the run's own code, so that a job's script knows what to do next: 0 the run is finished, 75 it has saved
    and the same command continues it, 2 its input is bad, 3 a rank failed or was lost, 4 a checkpoint is
    damaged.

    With --why it reads the record that torch's flight recorder wrote on each rank that failed in a
    collective, and says which rank waited for which.

    Examples:

        trilith status run
        trilith status run --since run/job-started --exit-code
        trilith status run --why
    """
    from ..runs.events import outcome
    from ..runs.flight_recorder import read_records_of, who_waits
    from ..runs.heartbeat import status_folder

    last_start = outcome(run, since=since)
    say(last_start.text)
    if why:
        records = read_records_of(status_folder(run))
        ranks, end = (counted(len(records), "rank"), ": none waited") if records else ("no rank", "")
        for line in who_waits(records) or [f"{ranks} left a record of collectives{end}"]:
            say(line)
    if exit_code:
        raise typer.Exit(STILL_RUNNING if last_start.code is None else last_start.code)
