"""``trilith report RUN...``."""

from pathlib import Path
from typing import Annotated

from .shared.options import FORCE, Strict
from .shared.parameters import As, There
from .shared.say import say


def report(
    runs: Annotated[list[Path], There, As("RUN"), "folder of a run; several runs are compared"],
    *,
    out: Annotated[
        Path | None, "HTML file to write; default: report.html in the run's folder, or here for several runs"
    ] = None,
    force: Annotated[bool, FORCE] = False,
    strict: Strict = False,
) -> None:
    """Write one HTML page about a run: curves, throughput, memory, events, recipe.

    The page needs no other file and no network, so it can be sent by mail. Several runs share their charts.

    Examples:

        trilith report run
        trilith report run-a run-b --out compared.html
    """
    from ..runs.report.page import write_report

    page = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    write_report(runs, page, force=force)
    say(str(page))
