"""``trilith plan MODEL --gpus N``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..system import no_garbage_search
from .shared.options import FORCE
from .shared.sizes import parse_amount, parse_counts

if TYPE_CHECKING:
    from ..search.find import Found
    from ..search.request import Request


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
        int | None, typer.Option(min=1, help="GPUs of a node; default: as many as in the maker's own servers")
    ] = None,
    seq: Annotated[
        str | None, typer.Option(help="tokens of a row, or several such as 8192,32768 for a sweep")
    ] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="rows of a step, over all ranks")] = None,
    lora: Annotated[int | None, typer.Option(min=1, help="train LoRA adapters of this rank")] = None,
    tokens: Annotated[str | None, typer.Option(help="tokens of the whole training, such as 15T")] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="plan `trilith generate` in the place of training")
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="data type of weights and cache, for --generate", metavar="DTYPE")
    ] = "bfloat16",
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
    mode of activation checkpointing, and times each layout that fits and could be the fastest. It prints the
    fastest layout of each cut of the model, up to ten: the same that timing every legal layout would give.
    Times are predictions: docs/planning.md says what they rest on. `trilith train RECIPE --dry-run` accepts
    the recipe that --write makes.

    With --generate the command lists, for `trilith generate`, what a rank holds in each layout: weights, the
    cache of keys and values of --global-batch rows (default: 16) of --seq tokens, and how many rows fit.

    Examples:

        trilith plan llama-3.1-8b --gpus 8
        trilith plan llama-3.1-405b --gpus 16384 --gpu h100-80gb --seq 8192 --global-batch 2048
        trilith plan llama-3.1-70b --gpus 64 --tokens 15T --write recipe.toml --html plan.html
        trilith plan llama-3.1-8b --gpus 8,16,32,64 --global-batch 128
        trilith plan llama-3.1-70b --gpus 4 --generate --seq 8192,32768
        trilith plan smollm2-135m --gpus 2 --seq 512 --global-batch 8 --machine bench.json
    """
    from ..parallel_state import BadInput
    from ..planner.time import machine_from_bench, machine_named
    from ..search.report import MARK, as_json, make_page, make_sweep_page, recipe_toml
    from ..search.request import read_request
    from ..storage.output_file import check_output_file, output_file
    from .shared.say import say

    def is_page(seen: bytes) -> bool:
        return seen.startswith(b"<!DOCTYPE html>") and MARK.encode() in seen

    counts: Sequence[int | None] = _counts(gpus, "--gpus") or [None]
    lengths: Sequence[int | None] = _counts(seq, "--seq") or [None]
    several = len(counts) * len(lengths) > 1
    if several and write:
        raise BadInput("plan", "--write", expected="one number of GPUs and one --seq", found="several")
    if generate and (write or html or lora or tokens):
        expected = "--generate without --write, --html, --lora and --tokens, which are of training"
        raise BadInput("plan", "--generate", expected=expected, found="one of them")
    if write is not None:
        check_output_file(write, force=force)
    if html is not None:
        check_output_file(html, ours=is_page, force=force)
    if machine is None:
        device = machine_named(gpu, gpus_per_node=gpus_per_node)
    else:
        device = machine_from_bench(machine, gpus_per_node=gpus_per_node)
    amount = None if tokens is None else parse_amount(tokens, "--tokens")
    rows = 16 if generate and global_batch is None else global_batch
    requests = [
        read_request(
            model, device, count, sequence_length=length, global_batch=rows, lora=lora,
            headroom=headroom, tokens=amount,
        )
        for count in counts
        for length in lengths
    ]  # fmt: skip
    if generate:
        _print_generation(requests, dtype, json)
        return
    with no_garbage_search(hide=True):
        results = [_search(request, 1 if several else 10) for request in requests]
    if json:
        import json as json_module

        found = [as_json(one) for one in results]
        say(json_module.dumps(found if several else found[0], indent=2))
    elif several:
        _print_sweep(results)
    else:
        _print(results[0])
    with ExitStack() as stack:  # both files can be written, or neither is
        files = []
        if write is not None:
            files.append((stack.enter_context(output_file(write, force=force)), recipe_toml(results[0])))
        if html is not None:
            page = make_sweep_page(results) if several else make_page(results[0])
            files.append((stack.enter_context(output_file(html, ours=is_page, force=force)), page))
        for file, text in files:
            file.write_text(text, encoding="utf-8")
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


def _search(request: Request, shown: int) -> Found:
    """Search with a progress bar on a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..runs.console import plain_console
    from ..search.find import find_layouts

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
    from ..search.report import SWEEP_HEAD, sweep_rows

    _table(SWEEP_HEAD, sweep_rows(results), left=2)


def _print_generation(requests: Sequence[Request], dtype: str, json: bool) -> None:
    from ..parallel_state import dtype_named
    from ..search.generation_layouts import generation_layouts
    from .shared.say import say

    found = [one for request in requests for one in generation_layouts(request, dtype_named(dtype))]
    if json:
        import json as json_module

        say(json_module.dumps([one.as_json() for one in found], indent=2))
        return
    data = found[0].request.recipe.data
    head = ("GPUs", "tokens of a row", "layout", "weights", f"cache of {data.global_batch:,} rows", "reading",
            "GB in all", "rows that fit")  # fmt: skip
    rows = []
    for one in found:
        memory, length = one.memory, one.request.recipe.data.sequence_length
        sizes = (f"{size / 1e9:.1f}" for size in (memory.weights, memory.cache, memory.reading, one.bytes))
        rows.append((f"{one.layout.world:,}", f"{length:,}", str(one.layout), *sizes, f"{one.most:,}"))
    _table(head, rows, left=2)


def _table(head: Sequence[str], rows: Sequence[tuple[str, ...]], *, left: int) -> None:
    from rich.table import Table

    from ..runs.console import plain_console

    table = Table()
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number == left else "right")
    for row in rows:
        table.add_row(*row)
    plain_console().print(table)
