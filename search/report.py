"""Tell what a search found: as plain data, as tables of text, and as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ..planner.time import spending
from ..runs.report.html import folded, table, whole_page
from .choice import raw_recipe, recipe_text
from .evaluate import Answer
from .find import Found
from .pictures import memory_of_stages, pareto, sweep, timetable_of
from .strategy import reasons, strategy, warnings

MARK = '<meta name="generator" content="trilith plan">'
HEAD = ("", "layout", "seconds", "tokens/s", "MFU", "waits", "GB")
SWEEP_HEAD = ("GPUs", "tokens of a row", "layout", "seconds", "tokens/s", "of a GPU", "GB")


def rows(found: Found) -> list[tuple[str, ...]]:
    """Return the table of the fastest layouts, one row each, as text."""
    return [
        (
            str(number),
            str(one.choice),
            f"{one.time.seconds:.3f}",
            f"{one.time.rate:,.0f}",
            f"{one.time.mfu.causal:.1%}",
            f"{one.time.parts['bubble'] / one.time.seconds:.1%}",
            f"{one.bytes / 1e9:.1f}",
        )
        for number, one in enumerate(found.best, 1)
    ]


def sweep_rows(results: Sequence[Found]) -> list[tuple[str, ...]]:
    """Return the table of the fastest layout of each search, one row each, as text."""
    rows: list[tuple[str, ...]] = []
    for found in results:
        best, request = found.best[0], found.request
        length, rate = request.recipe.data.sequence_length, best.time.rate
        rows.append((f"{request.gpus:,}", f"{length:,}", str(best.choice), f"{best.time.seconds:.3f}",
                     f"{rate:,.0f}", f"{rate / request.gpus:,.0f}", f"{best.bytes / 1e9:.1f}"))  # fmt: skip
    return rows


def counted(found: Found) -> list[tuple[str, str, str, str]]:
    """Return why other layouts were left out: kind, reason, number of layouts, and one example."""
    return [(one.kind, one.text, f"{one.layouts:,}", one.example) for one in found.tally]


def parts(answer: Answer) -> str:
    """Return where a step's time goes, in one line."""
    shown = sorted(answer.time.parts.items(), key=lambda one: -one[1])
    return ", ".join(f"{name} {seconds:.3f}" for name, seconds in shown if seconds >= 5e-4)


def headline(found: Found) -> str:
    """Return what was searched, in one line."""
    request = found.request
    return (
        f"{request.name} on {request.gpus:,} x {request.machine.name}: {found.legal:,} legal layouts, "
        f"{found.tally.count('memory'):,} of those looked at do not fit {request.room / 1e9:.1f} GB, "
        f"{len(found.timed):,} timed in full"
    )


def run_facts(found: Found) -> str | None:
    """Return what the whole training takes with the fastest layout, if the user said how many tokens."""
    if found.request.tokens is None:
        return None
    spent = spending(found.best[0].time, found.request.tokens, watts=found.request.machine.watts)
    return f"{spent.days:,.1f} days, {spent.gpu_hours:,.0f} GPU-hours, {spent.kilowatt_hours:,.0f} kWh"


def as_json(found: Found) -> dict[str, Any]:
    """Return everything that was found as plain data."""
    request = found.request
    return {
        "model": request.name,
        "gpus": request.gpus,
        "machine": request.machine.name,
        "room_bytes": request.room,
        "legal": found.legal,
        "layouts": [
            {
                "recipe": one.choice.keys,
                "seconds": one.time.seconds,
                "parts": dict(one.time.parts),
                "tokens_per_second": one.time.rate,
                "mfu": {"causal": one.time.mfu.causal, "full": one.time.mfu.full},
                "bytes": one.bytes,
            }
            for one in found.best
        ],
        "others": [
            {"kind": one.kind, "reason": one.text, "layouts": one.layouts, "example": one.example}
            for one in found.tally
        ],
        "strategy": reasons(request, found.best[0]),
        "warnings": warnings(request, found.best[0]),
    }


def recipe_head(found: Found) -> str:
    """Return the comment of a recipe: what the search found, and the runner-up."""
    request, best = found.request, found.best[0]
    lines = [
        f"{request.name} on {request.gpus:,} GPUs ({request.machine.name}), chosen by `trilith plan`: "
        f"{strategy(best.choice.layout)}.",
        f"Predicted: {best.time.seconds:.2f} s a step, MFU {best.time.mfu.causal:.0%}, waits "
        f"{best.time.parts['bubble'] / best.time.seconds:.0%}, {best.bytes / 1e9:.1f} GB of a GPU.",
    ]
    if len(found.best) > 1:
        second = found.best[1]
        lines.append(f"Runner-up: {second.choice}: {second.time.seconds:.2f} s, {second.bytes / 1e9:.1f} GB.")
    return "\n".join(lines)


def recipe_toml(found: Found) -> str:
    """Return the recipe of the fastest layout."""
    return recipe_text(raw_recipe(found.request, found.best[0].choice), recipe_head(found))


def make_page(found: Found) -> str:
    """Return the report as one page: no script, no other file, no network."""
    request, best = found.request, found.best[0]
    said = [*reasons(request, best), *(f"Warning: {one}." for one in warnings(request, best))]
    said += [f"Where a step's seconds go: {parts(best)}."]
    said += [f"The whole training: {facts}."] if (facts := run_facts(found)) is not None else []
    body = [
        f"<h1>Layouts of {escape(request.name)}</h1>",
        f"<p>{escape(headline(found))}</p>",
        "".join(f"<p>{escape(one)}</p>" for one in said),
        "<h2>The fastest layouts</h2>",
        table(rows(found), head=HEAD),
        f"<figure><figcaption>Memory against time</figcaption>{pareto(found)}</figure>",
        "<h2>Memory of the fastest layout</h2>",
        f"<figure><figcaption>By pipeline rank</figcaption>{memory_of_stages(found)}</figure>",
        *_schedule(found),
        "<h2>Why the others fall</h2>",
        table(counted(found), head=("", "reason", "layouts", "example")),
        folded("The recipe", f"<pre>{escape(recipe_toml(found))}</pre>"),
    ]
    return whole_page(f"trilith plan {request.name}", "".join(body), mark=MARK)


def _schedule(found: Found) -> list[str]:
    """Return the timetable of the fastest layout, if it has a pipeline."""
    best = found.best[0]
    if best.choice.layout.pipeline == 1:
        return []
    return [
        "<h2>Timetable of the fastest layout</h2>",
        f'<figure class="broad"><figcaption>When each pipeline rank computes</figcaption>'
        f"{timetable_of(found)}</figure>",
    ]


def make_sweep_page(results: Sequence[Found]) -> str:
    """Return the report of several searches as one page: how tokens a second grow with GPUs or tokens of a
    row.
    """
    name = results[0].request.name
    body = [
        f"<h1>Layouts of {escape(name)}</h1>",
        f"<figure><figcaption>Tokens a second of the fastest layouts</figcaption>{sweep(results)}</figure>",
        table(sweep_rows(results), head=SWEEP_HEAD),
    ]
    return whole_page(f"trilith plan {name}", "".join(body), mark=MARK)
