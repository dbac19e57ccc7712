"""Tell what a search found: as lines and tables of text, as plain data, and as a recipe; of several
searches, for several numbers of GPUs or lengths of a row, as one table.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...recipes.recipe_text import commented_recipe
from ...system import counted
from ..explanation import plain
from ..memory import reserved_words
from ..time import MACHINES, MIDDLE_HALF, TIMES_SLOWER, StepTime
from .choice import raw_recipe
from .evaluate import Answer
from .find import TIED, Found, ties
from .request import Request
from .strategy import reasons, strategy, warnings

HEAD = ("", "layout", "seconds", "tokens/s", "MFU", "waits", "GB")
#: The share of a step below which a part of its time is not shown.
_LEAST_PART = 5e-4


def rows(search: Found) -> list[tuple[str, ...]]:
    """Return the table of the fastest layouts, one row each, as text."""
    cells = list[tuple[str, ...]]()
    for number, answer in enumerate(search.best, 1):
        time, waits = answer.time, answer.time.parts["bubble"] / answer.time.seconds
        figures = f"{time.rate:,.0f}", f"{time.mfu.causal:.1%}", f"{waits:.1%}", f"{answer.bytes / 1e9:.1f}"
        cells.append((str(number), str(answer.choice), seconds_of(time.seconds), *figures))
    return cells


def seconds_of(seconds: float) -> str:
    """Return seconds with three digits at least."""
    return f"{seconds:.3f}" if seconds >= 0.1 else f"{seconds:.3g}"


def left_out(search: Found) -> list[tuple[str, str, str, str]]:
    """Return why other layouts were left out: kind, reason, number of layouts, and one example."""
    return [(reason.kind, reason.text, f"{reason.layouts:,}", reason.example) for reason in search.tally]


def asked(request: Request) -> str:
    """Return what is planned, in one line: also what the user did not say."""
    data = request.recipe.data
    step = f"steps of {counted(data.global_batch, 'row')} x {data.sequence_length:,} tokens"
    return f"{request.name}: {step} on {request.gpus:,} x {machine_of(request, request.gpus)}"


def machine_of(request: Request, gpus: int) -> str:
    """Return in words the kind of GPU, and the links between ``gpus`` of them."""
    machine = request.machine
    if gpus == 1:
        return machine.name
    nodes = f", {machine.between.name} between nodes" if gpus > machine.gpus else ""
    return f"{machine.name}, {machine.gpus} a node, {machine.inside.name} inside{nodes}"


def searched(search: Found) -> str:
    """Return how many layouts there are and how many were looked at, in one line."""
    return (
        f"of {search.legal:,} legal layouts {search.tally.count('memory'):,} that were tried do not fit in "
        f"{search.request.room / 1e9:.1f} GB; simulated completely: {len(search.timed):,}"
    )


def _tied(search: Found) -> list[tuple[str, str]]:
    """Return a fact if the first layout of the table is not told apart from some below it."""
    fastest = min(search.best, key=lambda answer: answer.time.seconds)
    count = sum(ties(answer, fastest) for answer in search.best)
    if count == 1:
        return []
    why = "which is less than the planner's error: of these the simplest one comes first"
    return [("tied", f"1 to {count} differ by less than {TIED:.0%}, {why}")]


def facts(search: Found) -> list[tuple[str, str]]:
    """Return facts about the fastest layout: a word, and a line."""
    request, best = search.request, search.best[0]
    mfu, peak = best.time.mfu, best.time.peak / 1e12
    conventions = (
        f"{mfu.causal:.1%} of {peak:,.4g} TFLOP/s a GPU if the causal half of attention counts, as in the "
        f"table; {mfu.full:.1%} if all of it counts"
    )
    lines = [
        *_tied(search),
        ("seconds", parts(best)),
        ("memory", _memory(search)),
        ("MFU", conventions),
        ("efficiency", best.time.source),
    ]
    if request.machine.name in MACHINES:
        least, usual, most = TIMES_SLOWER
        took = f"took {least:g} to {most:g} times as long as predicted, in the median {usual:g} times"
        steps = f"steps of runs that others published {took} (docs/published_runs.md of the repository)"
        lines += [("published", steps), ("range", _range(best.time))]
    lines += [("training", run_facts(search))] if request.tokens is not None else []
    return lines + [("warning", line) for line in warnings(request, best)]


def _memory(search: Found) -> str:
    """Return what the tensors of the heaviest rank have, and what torch's allocator reserves for them."""
    best, line = search.best[0], f"{search.best[0].allocated / 1e9:.1f} GB of tensors"
    if best.runtime:
        reserved = reserved_words(best.reserved, search.request.machine.memory)
        line += f" and {best.runtime / 1e9:.1f} GB for the runtime; reserved {reserved}"
    return line


def _range(time: StepTime) -> str:
    """Return between which figures a step lies if it is as far off as the middle half of published runs."""
    least, most = MIDDLE_HALF
    seconds = " to ".join(seconds_of(time.seconds * factor) for factor in (least, most))
    rates = " to ".join(f"{time.rate / factor:,.0f}" for factor in (most, least))
    mfus = " to ".join(f"{time.mfu.causal / factor:.1%}" for factor in (most, least))
    return f"as far off as the middle half of these: {seconds} s, {rates} tokens/s, MFU {mfus}"


def parts(answer: Answer) -> str:
    """Return where a step's time goes, in one line."""
    largest_first = sorted(answer.time.parts.items(), key=lambda part: -part[1])
    least = _LEAST_PART * answer.time.seconds
    return ", ".join(f"{name} {seconds_of(seconds)}" for name, seconds in largest_first if seconds >= least)


class Spent(NamedTuple):
    """State what a whole training takes: days, GPU-hours, and at a price and a wattage money and kWh."""

    days: float
    gpu_hours: float
    cost: float | None
    kilowatt_hours: float


def spent(search: Found) -> Spent:
    """Return what the whole training takes with the fastest layout; the request states its tokens."""
    request, time = search.request, search.best[0].time
    assert request.tokens is not None
    seconds = request.tokens / time.rate
    hours = seconds * time.ranks / 3600
    cost = None if request.price is None else hours * request.price
    return Spent(seconds / 86400, hours, cost, hours * request.machine.watts / 1000)


def run_facts(search: Found) -> str:
    """Return days, GPU-hours, energy and cost of the whole training, in one line."""
    request, whole = search.request, spent(search)
    line = f"{plain(request.tokens or 0)} tokens: {whole.days:,.1f} days, {whole.gpu_hours:,.0f} GPU-hours"
    if whole.cost is not None:
        line += f", {whole.cost:,.0f} at {request.price:g} a GPU-hour"
    if request.machine.watts:
        line += f", {whole.kilowatt_hours:,.0f} kWh at {request.machine.watts:g} W a GPU without its host"
    return line


def as_json(search: Found) -> dict[str, Any]:
    """Return everything that was found as plain data; docs/planning.md lists the keys."""
    request, best = search.request, search.best[0]
    others = ("kind", "reason", "layouts", "example")
    document: dict[str, Any] = {
        **asked_json(request),
        "legal": search.legal,
        "layouts": [_layout_json(answer) for answer in search.best],
        "others": [dict(zip(others, reason, strict=False)) for reason in search.tally],
        "strategy": reasons(search),
        "warnings": warnings(request, best),
    }
    if request.machine.name in MACHINES:
        document["times_slower"] = dict(zip(("least", "median", "most"), TIMES_SLOWER, strict=True))
    if request.tokens is not None:
        document["training"] = {"tokens": request.tokens} | spent(search)._asdict()
    return document


def asked_json(request: Request) -> dict[str, Any]:
    """Return what is planned, as plain data."""
    return {
        "model": request.name,
        "gpus": request.gpus,
        "machine": request.machine.name,
        "gpus_per_node": request.machine.gpus,
        "sequence_length": request.recipe.data.sequence_length,
        "global_batch": request.recipe.data.global_batch,
        "room_bytes": request.room,
    }


def _layout_json(answer: Answer) -> dict[str, Any]:
    return {
        "recipe": answer.choice.keys,
        "seconds": answer.time.seconds,
        "parts": dict(answer.time.parts),
        "tokens_per_second": answer.time.rate,
        "mfu": {"causal": answer.time.mfu.causal, "full": answer.time.mfu.full},
        "bytes": answer.bytes,
        "reserved_bytes": answer.reserved,
        "host_bytes": max(plan.host for plan in answer.memory),
        "bytes_of_pipeline_ranks": [plan.parts(answer.runtime) for plan in answer.memory],
    }


def recipe_head(search: Found) -> str:
    """Return the comment of a recipe: what the search found, and the runner-up."""
    request, best = search.request, search.best[0]
    lines = [
        f"{request.name} on {counted(request.gpus, 'GPU')} ({request.machine.name}), chosen by "
        f"`trilith plan`: {strategy(best.choice.layout)}.",
        f"Predicted: {_short(best.time.seconds)} s a step, MFU {best.time.mfu.causal:.0%}, waits "
        f"{best.time.parts['bubble'] / best.time.seconds:.0%}, {best.bytes / 1e9:.1f} GB of a GPU.",
    ]
    if len(search.best) > 1:
        second = search.best[1]
        seconds, size = _short(second.time.seconds), second.bytes / 1e9
        lines.append(f"Runner-up: {second.choice}: {seconds} s, {size:.1f} GB.")
    return "\n".join(lines)


def _short(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3g}"


def recipe_toml(search: Found) -> str:
    """Return the recipe of the fastest layout."""
    return commented_recipe(raw_recipe(search.request, search.best[0].choice), recipe_head(search))


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
