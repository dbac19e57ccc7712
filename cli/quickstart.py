"""``trilith quickstart``."""

from pathlib import Path
from typing import Annotated

import typer

from .shared.say import say_next, table


def quickstart(
    *,
    out: Annotated[Path, "new or empty folder for all files that the quickstart makes"] = Path("quickstart"),
) -> None:
    """Show in two minutes that a small model trains the same in two layouts.

    The quickstart works offline on a laptop CPU. Its text is the source code of Python's standard library. It
    trains a tokenizer and pretrains a small Llama on 4 processes, stops, resumes on 2 processes, compares the
    curve with a run on one process, exports to Hugging Face, and compares the export with transformers. It
    prints a table of checks and exits with code 1 if a check fails. OUT/report.html shows the curves.

    Examples:

        trilith quickstart
        trilith quickstart --out first-try
    """
    from rich.text import Text

    from ..runs.terminal import plain_console
    from .shared.quickstart import Quickstart

    console = plain_console()
    checks = Quickstart(out, lambda text: console.print(text, soft_wrap=True)).run()
    failed = Text("FAILED", "red")
    rows = [(check.what, check.figure, check.goal, "ok" if check.passed else failed) for check in checks]
    console.print(table("What was checked", ("check", "figure", "goal", ""), rows))
    console.print(f"curves: {out / 'report.html'}   model: {out / 'hf'}   run: {out / 'run'}")
    say_next(
        ["report", out / "run"],
        ["generate", out / "hf", "--prompt", "def main():"],
        ["train", out / "recipe.toml", f"out={out / 'longer'}", "steps=1000"],
    )
    if not all(check.passed for check in checks):
        raise typer.Exit(1)
