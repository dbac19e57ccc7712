"""Print what ``trilith plan`` found, and make its page."""

from collections.abc import Sequence
from functools import partial
from textwrap import wrap

from ...parallel_state import BadInput, dtype_name, dtype_named
from ...planner.search.find import Found
from ...planner.search.generation_layouts import GenerationChoice, generation_layouts
from ...planner.search.pages import make_page, make_sweep_page
from ...planner.search.report import (
    HEAD,
    as_json,
    facts,
    found_ones,
    left_out,
    machine_of,
    rows,
    searched,
    sweep_head,
    sweep_json,
    sweep_rows,
    sweep_warnings,
)
from ...planner.search.request import Request
from ...planner.search.strategy import reasons
from ...runs.report.html import is_page_of
from ...runs.terminal import plain_console
from ...system import counted
from .say import say, say_json

#: Characters: the least of a column of layouts, the longest line of a column's name, and more than any table.
_LAYOUT, _NAME, _WIDEST = 26, 8, 1000


#: Tells whether a file begins as a page that ``page_of`` made.
is_page = partial(is_page_of, "trilith plan")


def page_of(results: Sequence[Found]) -> str:
    """Return the page of one search or of several."""
    search = _single(results)
    return make_page(search) if search else make_sweep_page(results)


def _single(results: Sequence[Found]) -> Found | None:
    """Return the only search: a sweep has a table in the place of its details."""
    return results[0] if len(results) == 1 else None


def print_plan(results: Sequence[Found], json: bool) -> None:
    """Print one search, or the table of several."""
    search = _single(results)
    if json:
        say_json(as_json(search) if search else sweep_json(results))
    elif search:
        _table(HEAD, rows(search), left=1)
        for line in reasons(search):
            say(line)
        for word, line in facts(search):
            say(f"{word:<14} {line}")
        say(f"\nRuled out: {searched(search)}")
        for kind, reason, layouts, example in left_out(search):
            say(f"  {layouts:>12}  {kind}: {reason}" + (f"; nearest: {example}" if example else ""))
    else:
        _print_sweep(results)


def _print_sweep(results: Sequence[Found]) -> None:
    _table(sweep_head(results), sweep_rows(results), left=3)
    for line in sweep_warnings(results):
        say(f"warning        {line}")
    for search in results:
        if search.error is not None:
            say(f"none           {counted(search.request.gpus, 'GPU')}: {search.error}")


def print_generation(requests: Sequence[Request], dtype: str, json: bool) -> None:
    """Print the layouts of ``trilith generate`` for each request."""
    kind, choices = dtype_named(dtype), list[GenerationChoice]()
    unmet: list[Found] = []
    for request in requests:
        try:
            choices += generation_layouts(request, kind)
        except BadInput as error:
            unmet.append(Found(request, error=error))
    if not choices:
        found_ones(unmet)
    if json:
        say_json([choice.as_json() for choice in choices] + sweep_json(unmet))
        return
    data, first = choices[0].request.recipe.data, choices[0].request
    most = max((choice.request for choice in choices), key=lambda choice: choice.gpus)
    say(
        f"{first.name} on {machine_of(most, most.gpus)}: GB of the rank that needs most, "
        f"numbers in {dtype_name(dtype)}; a GPU may hold {first.room / 1e9:.1f} GB"
    )
    cache = f"cache of {counted(data.global_batch, 'row')}"
    head = ("GPUs", "tokens of a row", "layout", "weights", cache, "reading", "GB in all", "rows that fit")
    lines = []
    for choice in choices:
        memory, length = choice.memory, choice.request.recipe.data.sequence_length
        sizes = (f"{size / 1e9:.1f}" for size in (memory.weights, memory.cache, memory.reading, choice.bytes))
        layout = choice.layout
        lines.append((f"{layout.world:,}", f"{length:,}", str(layout), *sizes, f"{choice.most:,}"))
    _table(head, lines, left=2)
    for without in unmet:
        say(f"none           {counted(without.request.gpus, 'GPU')}: {without.error}")


def _table(head: Sequence[str], lines: Sequence[tuple[str, ...]], *, left: int) -> None:
    """Print a table whose column ``left`` holds layouts, which break over lines; numbers are never cut."""
    from rich.measure import Measurement
    from rich.table import Table

    table = Table()
    for number, name in enumerate(head):
        if number == left:
            table.add_column(name, min_width=_LAYOUT)
            continue
        cells = [line[number] for line in lines]
        room = max(map(len, [*cells, " " * _NAME]))
        names = wrap(name, room, break_on_hyphens=False, break_long_words=False)
        width = max(map(len, [*cells, *names]))
        table.add_column("\n".join(names), justify="right", no_wrap=True, min_width=width)
    for line in lines:
        table.add_row(*line)
    console = plain_console()
    needed = Measurement.get(console, console.options.update(width=_WIDEST), table).minimum
    console.width = max(console.width, needed)
    console.print(table)
