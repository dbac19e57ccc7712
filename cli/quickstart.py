"""``trilith quickstart``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def quickstart(
    out: Annotated[Path, typer.Option(help="a new or empty folder for everything that is made")] = Path(
        "quickstart"
    ),
) -> None:
    """Tokenizer, pretraining, stop, resume in another layout, export, comparison with transformers: in two
    minutes.

    Works offline on a laptop's CPU, on the sources of Python's standard library. Prints a table of what was
    checked and exits with 1 if one check failed.
    """
    from rich.table import Table
    from rich.text import Text

    from ..runs.console import plain_console
    from ..testing.quickstart import Quickstart

    console = plain_console()
    checks = Quickstart(out, lambda text: console.print(text, soft_wrap=True)).run()
    table = Table(title="What was checked", title_justify="left")
    for column in ("check", "figure", "goal", ""):
        table.add_column(column)
    for check in checks:
        table.add_row(check.what, check.figure, check.goal, "ok" if check.passed else Text("FAILED", "red"))
    console.print(table)
    console.print(f"curves: {out / 'loss.png'}   model: {out / 'hf'}   run: {out / 'run'}")
    if not all(check.passed for check in checks):
        raise typer.Exit(1)
