"""``trilith bench``."""

from pathlib import Path
from typing import Annotated

import typer

from ..system import BadInput, require
from .shared.options import TESTED
from .shared.parameters import Range, from_options
from .shared.say import progress_bar, say


def bench(
    *,
    out: Annotated[Path, "folder for bench.json and bench.html, and temporary files"] = Path("trilith-bench"),
    only: Annotated[str | None, "parts to run: speed, parity, links, mfu, memory, saving, conversion"] = None,
    minutes: Annotated[float, Range(0.1, 600), "start no new measurement after this many minutes"] = 10.0,
    device: Annotated[str | None, "cpu or cuda; default: the GPUs if there are any"] = None,
    quick: Annotated[bool, "measure tiny shapes and few steps, to see that everything runs"] = False,
) -> None:
    """Measure training on this machine, and write one JSON and one HTML page.

    The bench compares each layout that the node can hold with one process in fp64, and measures the device's
    own speed, the links, training steps of the shapes of Llama 3.2 1B
    and Llama 3.1 8B (on a CPU: of small ones), eager and compiled, peak memory against the planner's figure,
    how much longer a step takes because of a checkpoint, and conversion. Each measurement runs in processes
    of its own; one that fails is a row of the report, and the others still run. The exit code is 1 if a
    measurement failed or a comparison found a difference. Tested on CPUs and, in part, on one H100; not yet
    on several GPUs.

    Examples:

        trilith bench
        trilith bench --only parity,mfu --minutes 4 --out first-look
        trilith bench --device cpu --quick
    """
    options = locals()
    from collections.abc import Sequence
    from contextlib import suppress

    from rich.progress import MofNCompleteColumn, TimeElapsedColumn

    from ..machine import measure
    from ..machine.measure.cases import PARTS, Case
    from ..machine.measure.run import Row, check_parts, make_page, report_json, shown_figure
    from ..storage.file_names import FolderKind, kinds_of
    from ..storage.output_places import check_output_file, make_folder
    from ..storage.staging import output_file

    parts = tuple(PARTS) if only is None else tuple(word.strip() for word in only.split(","))
    check_parts(parts)
    fits = not out.is_dir() or not any(out.iterdir())
    require(fits, out, None, "a new folder, or an empty one", "files in it", "Name another place with --out")
    for folder in out.absolute().parents:
        kinds = kinds_of(folder) if folder.is_dir() else []
        if kinds and kinds != [FolderKind.TOKENS]:  # token files lie where one works
            around, todo = f"{folder}, {kinds[0].value}", "Name another place with --out"
            expected = "a place outside other folders of trilith's"
            raise BadInput(out, expected=expected, found=around, todo=todo)
    files = out / "bench.json", out / "bench.html"
    for file in files:
        check_output_file(file, parents=True)
    is_new = not out.exists()
    make_folder(out)
    try:
        with progress_bar(MofNCompleteColumn(), TimeElapsedColumn()) as progress:
            task = progress.add_task("looking at the machine", total=None)
            names: list[str] = []

            def begin(cases: Sequence[Case]) -> None:
                names.extend(f"{case.part}: {case.what}" for case in cases)
                progress.update(task, total=len(cases), description=names[0])

            def done(row: Row) -> None:
                figures = ", ".join(f"{key} {shown_figure(value)}" for key, value in row.figures.items())
                words = "; ".join(text for text in (figures, row.note) if text)
                say(f"{row.part}: {row.what}: {row.status}; {words} ({row.seconds:.1f} s)")
                progress.advance(task)
                if len(names) > (at := int(progress.tasks[0].completed)):
                    progress.update(task, description=names[at])

            report = from_options(measure, options, only=parts, begin=begin, done=done)
    except BaseException:
        if is_new:
            with suppress(OSError):
                out.rmdir()
        raise
    for file, text in zip(files, (report_json(report), make_page(report)), strict=True):
        with output_file(file, parents=True) as path:
            path.write_text(text, encoding="utf-8")
    say(f"wrote {files[0]} and {files[1]}: please send both")
    say(f"{TESTED} docs/gpu.md of the repository says what that leaves open.")
    if any(row.status in ("failed", "differs") for row in report.rows):
        raise typer.Exit(1)
