"""Write a run, or several over each other, as one HTML page: no script, no other file, no network."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from ...storage.output_places import check_output_file
from ...storage.staging import output_file
from ...system import counted
from ..events import flat_recipe
from .chart import Chart, Series, shown
from .html import folded, is_page_of, table, whole_page
from .record import RunRecord, read_run, with_vanished

#: Key of a metrics line, title, unit, factor from the file's unit to the chart's.
CHARTS = (
    ("loss", "Loss", "nats a token", 1.0),
    ("lr", "Learning rate", "", 1.0),
    ("grad_norm", "Gradient norm", "before clipping", 1.0),
    ("tokens_per_second", "Throughput", "tokens a second", 1.0),
    ("mfu_causal", "MFU", "percent of peak, causal attention", 100.0),
    ("memory", "Memory", "GiB, of the rank that uses most", 2.0**-30),
)
#: Columns of the table of steps.
COLUMNS = (
    *("loss", "evaluation_loss", "evaluation_perplexity", "lr", "grad_norm", "tokens_per_second"),
    *("mfu_causal", "mfu_full", "memory", "seconds"),
)
UNITS = {"memory": "memory (GiB)"}
_is_report = partial(is_page_of, "trilith report")
#: Rows of a run's table of steps; of a longer run every n-th.
_MOST_ROWS = 1000


def write_report(folders: Sequence[Path], out: Path, *, force: bool = False) -> None:
    """Read the runs' folders and write the page.

    ``BadInput`` for a folder in which no run has written, or an ``out`` that cannot be a file, or that exists
    and is no report, unless ``force``.
    """
    read = [folder / name for folder in folders for name in ("metrics.jsonl", "events.jsonl")]
    check_output_file(out, ours=_is_report, force=force, inputs=read, parents=True)
    page = make_report([read_run(folder) for folder in folders])
    with output_file(out, ours=_is_report, force=force, parents=True) as path:
        path.write_text(page, encoding="utf-8")


def make_report(runs: Sequence[RunRecord]) -> str:
    """Return the page. All text from a run's files is escaped."""
    names, several = [run.name for run in runs], len(runs) > 1
    title = f"{len(runs)} runs compared" if several else f"Training run: {runs[0].name}"
    columns = [_facts(run) for run in runs]
    summary = ([key, *(facts[key] for facts in columns)] for key in columns[0])
    body = [
        f"<h1>{escape(title)}</h1>",
        table(summary, caption="In short", head=["run", *names] if several else ()),
        "<h2>Curves</h2>",
        f'<div class="charts">{"".join(_charts(runs))}</div>',
        _differences(runs) if several else "",
    ]
    for number, run in enumerate(runs):
        heading = f"<h2>{escape(run.name)}</h2>" if several else ""
        body.append(
            f'<section id="run-{number}">{heading}{_events(run)}{_recipe(run)}{_steps(run)}</section>'
        )
    return whole_page(title, "".join(body), command="trilith report")


def _charts(runs: Sequence[RunRecord]) -> Iterable[str]:
    """Yield the charts. A run has one colour and one pattern on all of them; evaluations have marks."""
    alone = len(runs) == 1
    attempts = runs[0].attempts if alone else []
    resumed = sorted({attempt["step"] for attempt in attempts if attempt["event"] == "resumed"})
    for key, title, unit, factor in CHARTS:
        series = []
        for number, run in enumerate(runs):
            label = title if alone else run.name
            if key == "loss":
                label = "training" if alone else f"{run.name}: training"
            points = [(step, None if value is None else value * factor) for step, value in run.column(key)]
            series.append(Series(label, points, number))
            if key == "loss":
                label, style = ("evaluation", 1) if alone else (f"{run.name}: evaluation", number)
                series.append(Series(label, run.column("evaluation_loss"), style, marked=True))
        yield Chart(key, title, unit, series, resumed).svg()


def _facts(run: RunRecord) -> dict[str, str]:
    last = run.steps[-1] if run.steps else {}
    evaluations = [(value, step) for step, value in run.column("evaluation_loss") if value is not None]
    best = min(evaluations, default=None)
    rates = sorted(value for _, value in run.column("tokens_per_second") if value)
    memory = [value for _, value in run.column("memory") if value]
    pairs = ((line.get("mfu_causal"), line.get("mfu_full")) for line in run.steps)
    mfu = sorted((causal, full) for causal, full in pairs if causal and full)
    middle = mfu[len(mfu) // 2] if mfu else None
    layouts = list(dict.fromkeys(str(attempt.get("layout")) for attempt in run.attempts))
    resumes = sum(attempt["event"] == "resumed" for attempt in run.attempts)
    skipped = ", ".join(run.skipped[:20]) + (" ..." if len(run.skipped) > 20 else "")
    return {
        "state": run.state,
        "layout": "; then ".join(layouts) or "unknown",
        "resumed": ("never", "once")[resumes] if resumes < 2 else f"{resumes} times",
        "last loss": f"{shown(last['loss'])} at step {run.done:,}" if last else "none",
        "best evaluation loss": f"{shown(best[0])} at step {best[1]:,}" if best else "not evaluated",
        "tokens": f"{sum(line['tokens'] for line in run.steps):,}",
        "median throughput": f"{rates[len(rates) // 2]:,.0f} tokens/s" if rates else "unknown",
        "median MFU": f"{middle[0]:.1%} (all of attention: {middle[1]:.1%})" if middle else "peak not known",
        "most memory": f"{max(memory) / 2**30:.2f} GiB" if memory else "unknown",
        "skipped steps": f"{len(run.skipped)}: {skipped}" if skipped else "none",
        "slow ranks": "; ".join(run.slow_ranks) or "none noted",
        "last complete checkpoint": run.checkpoint or "none",
    }


def _events(run: RunRecord) -> str:
    rows = [
        (_utc(event["time"]), event["event"], f"{event['step']:,}", _detail(event))
        for event in with_vanished(run.events)
    ]
    return table(rows, caption="What happened", head=("time (UTC)", "event", "after step", "what"))


def _utc(seconds: float | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"


def _detail(event: dict[str, Any]) -> str:
    match event["event"]:
        case "started":
            source = event.get("weights")
            return _where(event) + (f", weights from {source}" if source else "")
        case "resumed":
            return f"{_where(event)}, from {event['checkpoint']}, written by {event['written_by']}"
        case "saved":
            return str(event["checkpoint"])
        case "vanished":
            return "no word of how it ended: killed, or its machine lost"
        case "finished" if event["step"] < event["goal"]:
            return f"of {event['goal']:,}, as asked"
        case _:
            return str(event.get("why", ""))


def _where(attempt: dict[str, Any]) -> str:
    layout, ranks = attempt["layout"], counted(attempt["world"], "rank")
    where = f"on {ranks} ({layout})" if attempt["world"] > 1 else f"on {layout}"
    return f"{where}; {attempt['fitted']}" if attempt.get("fitted") else where


def _recipe(run: RunRecord) -> str:
    flat = flat_recipe(run.recipe) if run.recipe else {}
    rows = [(key, text) for key, text in flat.items() if text != "null"]
    return folded("Recipe of the last attempt", table(rows)) if rows else ""


def _differences(runs: Sequence[RunRecord]) -> str:
    flats = [flat_recipe(run.recipe) if run.recipe else {} for run in runs]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    rows = [[key, *(flat.get(key, "null") for flat in flats)] for key in keys]
    odd = [row for row in rows if len(set(row[1:])) > 1]
    return table(odd, caption="Where the recipes differ", head=["key", *(run.name for run in runs)])


def _steps(run: RunRecord) -> str:
    stride = max(1, -(-len(run.steps) // _MOST_ROWS))
    columns = [key for key in COLUMNS if any(key in line for line in run.steps)]
    rows = [[str(line["step"] + 1), *(_cell(line, key) for key in columns)] for line in run.steps[::stride]]
    head = ["step", *(UNITS.get(key, key.replace("_", " ")) for key in columns)]
    which = "every step" if stride == 1 else f"one step in {stride}; all of them are in metrics.jsonl"
    return folded(f"Numbers ({which})", table(rows, head=head, numbers=True))


def _cell(line: dict[str, Any], key: str) -> str:
    if key not in line:
        return ""
    if line[key] is None:
        return "not finite"
    if key == "memory":
        return f"{line[key] / 2**30:.2f}"
    if not isinstance(line[key], int | float):
        return str(line[key])
    return f"{line[key]:.1%}" if key.startswith("mfu") else shown(line[key], 6)
