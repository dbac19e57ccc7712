"""Search for several numbers of GPUs or lengths of a row, and tell what was found as one table."""

from collections.abc import Sequence
from typing import Any

from ...system import counted
from .find import Found
from .report import as_json, asked_json, machine_of, seconds_of, spent
from .request import Request
from .strategy import warnings


def found_ones(results: Sequence[Found]) -> list[Found]:
    """Return the searches that found a layout; raises the first one's ``BadInput`` if there is none."""
    searches = [search for search in results if search.error is None]
    if not searches:
        raise results[0].error or AssertionError
    return searches


def asked_in_sweep(requests: Sequence[Request]) -> str:
    """Return what all rows of the table have in common, in one line."""
    most = max(request.gpus for request in requests)
    return f"{requests[0].name} on {machine_of(requests[0], most)}"


def sweep_head(results: Sequence[Found]) -> tuple[str, ...]:
    """Return the head of the table; days and GPU-hours are there if the user stated the tokens of a run."""
    head = ["GPUs", "tokens of a row", "rows", "layout", "seconds", "tokens/s", "of a GPU", "GB"]
    first = results[0].request
    if first.tokens is not None:
        head += ["days", "GPU-hours"] + ["cost"] * (first.price is not None)
    return tuple(head)


def sweep_rows(results: Sequence[Found]) -> list[tuple[str, ...]]:
    """Return the table of the fastest layout of each search, one row each, as text."""
    rows: list[tuple[str, ...]] = []
    width = len(sweep_head(results))
    for search in results:
        request = search.request
        data = request.recipe.data
        row = [f"{request.gpus:,}", f"{data.sequence_length:,}", f"{data.global_batch:,}"]
        if search.error is not None:
            rows.append((*row, f"none: {search.error.found}", *("",) * (width - 4)))
            continue
        best = search.best[0]
        rate = best.time.rate
        row += [str(best.choice), seconds_of(best.time.seconds), f"{rate:,.0f}",
                f"{rate / request.gpus:,.0f}", f"{best.bytes / 1e9:.1f}"]  # fmt: skip
        if request.tokens is not None:
            whole = spent(search)
            row += [f"{whole.days:,.1f}", f"{whole.gpu_hours:,.0f}"]
            row += [] if whole.cost is None else [f"{whole.cost:,.0f}"]
        rows.append(tuple(row))
    return rows


def sweep_warnings(results: Sequence[Found]) -> list[str]:
    """Return the warnings about the layouts of the table, each with the rows that it is about."""
    rows_of_line: dict[str, list[str]] = {}
    for search in found_ones(results):
        request = search.request
        row = f"{counted(request.gpus, 'GPU')} with {request.recipe.data.sequence_length:,} tokens of a row"
        for line in warnings(request, search.best[0]):
            rows_of_line.setdefault(line, []).append(row)
    return [f"{'; '.join(rows)}: {line}" for line, rows in rows_of_line.items()]


def sweep_json(results: Sequence[Found]) -> list[dict[str, Any]]:
    """Return each search as plain data; ``error`` says why one found nothing."""
    return [
        as_json(search)
        if search.error is None
        else asked_json(search.request) | {"layouts": [], "error": str(search.error)}
        for search in results
    ]
