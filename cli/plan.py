"""``trilith plan MODEL --gpus N``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .shared.options import FORCE
from .shared.sizes import parse_amount, parse_counts

if TYPE_CHECKING:
    from ..search.find import Found


def plan(
    model: Annotated[
        str,
        typer.Argument(help="published size, config.json, Hugging Face folder, or recipe", metavar="MODEL"),
    ],
    gpus: Annotated[
        str | None, typer.Option(help="number of GPUs, or several such as 8,16,32 for a scaling curve")
    ] = None,
    gpu: Annotated[str, typer.Option(help="kind of GPU; a wrong name lists all")] = "h100-80gb",
    machine: Annotated[
        Path | None,
        typer.Option(
            help="bench.json of `trilith bench` on your machine, in the place of --gpu",
            metavar="BENCH.json",
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a node; default: as the makers' servers have")
    ] = None,
    seq: Annotated[
        str | None, typer.Option(help="tokens of a row, or several such as 8192,32768 for a sweep")
    ] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="rows of a step, over all ranks")] = None,
    lora: Annotated[int | None, typer.Option(min=1, help="train LoRA adapters of this rank")] = None,
    tokens: Annotated[str | None, typer.Option(help="tokens of the whole training, such as 15T")] = None,
    headroom: Annotated[
        float, typer.Option(min=0, max=0.9, help="share of a GPU's memory to leave free")
    ] = 0.08,
    write: Annotated[
        Path | None, typer.Option(help="recipe of the fastest layout to write", metavar="RECIPE.toml")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="report to write, one page", metavar="PAGE.html")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object, for programs")] = False,
    force: Annotated[bool, typer.Option("--force", help=FORCE)] = False,
) -> None:
    """Find the fastest layout of a model that fits, and why the others do not.

    The search lists every legal layout, with each pipeline schedule, ZeRO stage, size of a micro-batch and
    mode of activation checkpointing, and times those that fit and could be the fastest. It prints the fastest
    layout of each cut of the model, up to ten. Times are predictions: docs/planning.md says what they rest
    on. `trilith train RECIPE --dry-run` accepts the recipe that --write makes.

    Examples:

        trilith plan llama-3.1-8b --gpus 8
        trilith plan llama-3.1-405b --gpus 16384 --gpu h100-80gb --seq 8192 --global-batch 2048
        trilith plan llama-3.1-70b --gpus 64 --tokens 15T --write recipe.toml --html plan.html
        trilith plan llama-3.1-8b --gpus 8,16,32,64 --global-batch 128
        trilith plan smollm2-135m --gpus 2 --seq 512 --global-batch 8 --machine bench.json
    """
    from ..parallel_state import BadInput
    from ..planner.time import machine_from_bench, machine_named
    from ..search.report import MARK, as_json, make_page, recipe_toml
    from ..search.request import read_request
    from ..storage.output_file import check_output_file, output_file
    from .shared.say import say

    def is_page(seen: bytes) -> bool:
        return seen.startswith(b"<!DOCTYPE html>") and MARK.encode() in seen

    counts: Sequence[int | None] = _counts(gpus, "--gpus") or [None]
    lengths: Sequence[int | None] = _counts(seq, "--seq") or [None]
    if len(counts) * len(lengths) > 1 and (write or html):
        raise BadInput(
            "plan", "--write, --html", expected="one number of GPUs and one --seq", found="several"
        )
    if write is not None:
        check_output_file(write, force=force)
    if html is not None:
        check_output_file(html, ours=is_page, force=force)
    if machine is None:
        device = machine_named(gpu, gpus_per_node=gpus_per_node)
    else:
        device = machine_from_bench(machine, gpus_per_node=gpus_per_node)
    amount = None if tokens is None else parse_amount(tokens, "--tokens")
    results = []
    for count in counts:
        for length in lengths:
            request = read_request(
                model, device, count, sequence_length=length, global_batch=global_batch, lora=lora,
                headroom=headroom, tokens=amount,
            )  # fmt: skip
            results.append(_search(request, 10 if len(counts) * len(lengths) == 1 else 1))
    if json:
        import json as json_module

        found = [as_json(one) for one in results]
        say(json_module.dumps(found[0] if len(found) == 1 else found, indent=2))
    elif len(results) > 1:
        _print_sweep(results)
    else:
        _print(results[0])
    with ExitStack() as stack:  # both files can be written, or neither is
        files = []
        if write is not None:
            files.append((stack.enter_context(output_file(write, force=force)), recipe_toml))
        if html is not None:
            files.append((stack.enter_context(output_file(html, ours=is_page, force=force)), make_page))
        for file, text_of in files:
            file.write_text(text_of(results[0]), encoding="utf-8")
    for path in (write, html):
        if path is not None and not json:
            say(f"wrote {path}")


def _counts(text: str | None, option: str) -> list[int] | None:
    """Parse one or more numbers of at least 1."""
    from ..parallel_state import BadInput

    found = parse_counts(text, "plan", option)
    if found is not None and not all(1 <= one <= 2**24 for one in found):
        raise BadInput("plan", option, expected="numbers from 1 to 16,777,216", found=text)
    return found


def _search(request: object, shown: int) -> Found:
    """Search with a progress bar on a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..runs.console import plain_console
    from ..search.find import find_layouts
    from ..search.request import Request

    assert isinstance(request, Request)
    console = plain_console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("listing layouts", total=None)

        def told(found: Found) -> None:
            words = f"{found.settled:,} of {found.legal:,} layouts settled, {len(found.best)} found"
            progress.update(task, total=found.legal, completed=found.settled, description=words)

        return find_layouts(request, shown=shown, told=told)


def _print(found: Found) -> None:
    from ..runs.console import plain_console
    from ..search.report import HEAD, counted, headline, parts, rows, run_facts
    from ..search.strategy import reasons, warnings

    console, best = plain_console(soft_wrap=True), found.best[0]
    console.print(headline(found))
    _table(HEAD, rows(found), left=1)
    for line in reasons(found.request, best):
        console.print(line)
    console.print(f"seconds        {parts(best)}")
    console.print(f"efficiency     {best.time.source}")
    if (facts := run_facts(found)) is not None:
        console.print(f"training       {facts}")
    for line in warnings(found.request, best):
        console.print(f"warning        {line}")
    console.print("\nwhy the others fall")
    for kind, reason, layouts, example in counted(found):
        console.print(f"  {layouts:>12}  {kind}: {reason}" + (f"; nearest: {example}" if example else ""))


def _print_sweep(results: list[Found]) -> None:
    rows = []
    for found in results:
        best, request = found.best[0], found.request
        length, rate = request.recipe.data.sequence_length, best.time.rate
        rows.append((f"{request.gpus:,}", f"{length:,}", str(best.choice), f"{best.time.seconds:.3f}",
                     f"{rate:,.0f}", f"{rate / request.gpus:,.0f}", f"{best.bytes / 1e9:.1f}"))  # fmt: skip
    _table(("GPUs", "tokens of a row", "layout", "seconds", "tokens/s", "of a GPU", "GB"), rows, left=2)


def _table(head: Sequence[str], rows: Sequence[tuple[str, ...]], *, left: int) -> None:
    from rich.table import Table

    from ..runs.console import plain_console

    table = Table()
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number == left else "right")
    for row in rows:
        table.add_row(*row)
    plain_console().print(table)
