"""Write a report as one HTML page: tables and pictures, no script, no other file, no network."""

import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ...runs.report.html import folded, table, whole_page
from .cases import PARTS
from .row import Row
from .run import Report

MARK = '<meta name="generator" content="trilith bench">'
TITLES = {
    "speed": "The device itself",
    "parity": "Each layout against one process in fp64",
    "links": "Links between ranks",
    "layers": "Parallel layers on one tensor rank against torch.nn",
    "mfu": "Training steps",
    "memory": "Peak memory against the planner's figure",
    "saving": "Checkpoints: how much longer a step takes",
    "conversion": "Conversion",
}
#: Colours that can be read on light and dark paper.
_OURS, _OTHER, _INK = "#3b82c4", "#b0802f", "#7a8088"


def make_page(report: Report) -> str:
    """Return the page of a report."""
    body = [
        "<h1>trilith bench</h1>",
        table([[key, _text(value)] for key, value in report.machine.items()], caption="Machine"),
        _pictures(report.rows),
    ]
    for part in PARTS:
        rows = [row for row in report.rows if row.part == part]
        if rows:
            body += [f"<h2>{escape(TITLES[part])}</h2>", _part(rows)]
    findings = ([finding.level, finding.check, finding.found, finding.todo] for finding in report.doctor)
    body += ["<h2>Doctor</h2>", table(findings, head=("", "check", "found", "what to do"))]
    return whole_page("trilith bench", "".join(body), mark=MARK)


def _part(rows: Sequence[Row]) -> str:
    """Write the table of a part, a measurement a column if there are few, and what failed ones printed."""
    keys = list(dict.fromkeys(key for row in rows for key in row.figures))
    lines = [["result", *(row.status for row in rows)]]
    lines += [[key, *(shown_figure(row.figures.get(key, "")) for row in rows)] for key in keys]
    lines += [["seconds to measure", *(f"{row.seconds:.1f}" for row in rows)]]
    lines += [["note", *(row.note for row in rows)]]
    printed = "".join(
        folded(f"{row.what}: what it printed", f"<pre>{escape(row.output)}</pre>")
        for row in rows
        if row.output
    )
    return table(lines, head=("", *(row.what for row in rows))) + printed


def shown_figure(value: float | str | None) -> str:
    """Return a figure as people read it: 4 digits, thousands set apart."""
    if value is None or isinstance(value, str):
        return "not finite" if value is None else value
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _pictures(rows: Iterable[Row]) -> str:
    """Draw utilization and memory as bars; nothing where neither was measured."""
    rows = [row for row in rows if row.figures]
    share = "MFU, causal" if any("MFU, causal" in row.figures for row in rows) else "of the matmul, causal"
    bars = [
        (_named(rows, share), ((share, 100.0, _OURS),), "percent"),
        (_named(rows, "peak: GB"), (("peak: GB", 1.0, _OURS), ("planned: GB", 1.0, _OTHER)), "GB"),
    ]
    drawn = [(named, columns, unit) for named, columns, unit in bars if named]
    return f"<figure>{_bars(drawn)}</figure>" if drawn else ""


def _named(rows: Iterable[Row], key: str) -> list[Row]:
    return [row for row in rows if key in row.figures]


def _bars(charts: Sequence[tuple[list[Row], Sequence[tuple[str, float, str]], str]]) -> str:
    """Return horizontal bars as SVG, one chart below the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [len(rows) * len(columns) + 1 for rows, columns, _ in charts]
    # Text stays text: it can be searched, and needs no font of this machine.
    with pyplot.rc_context({"svg.fonttype": "none", "text.color": _INK, "font.size": 10}):
        figure, axes = pyplot.subplots(
            len(charts), 1, figsize=(8, 0.35 * sum(heights) + 0.8), squeeze=False, height_ratios=heights
        )
        for (rows, columns, unit), ax in zip(charts, axes[:, 0], strict=True):
            for number, (key, factor, colour) in enumerate(columns):
                places = [row * len(columns) + number for row in range(len(rows))]
                values = [factor * float(row.figures.get(key) or 0.0) for row in rows]
                ax.barh(places, values, height=0.8, color=colour, label=key)
                for place, value in zip(places, values, strict=True):
                    ax.annotate(f" {value:.3g}", (value, place), va="center")
            middle = (len(columns) - 1) / 2
            ax.set_yticks(
                [row * len(columns) + middle for row in range(len(rows))],
                [f"{row.part}: {row.what}" for row in rows],
            )
            ax.set_title(f"{', '.join(key for key, _, _ in columns)} ({unit})", loc="left", fontsize=10)
            ax.invert_yaxis()
            ax.tick_params(colors=_INK)
            ax.spines[["top", "right", "bottom"]].set_visible(False)
            ax.spines["left"].set_color(_INK)
            ax.xaxis.set_visible(False)
            if len(columns) > 1:
                ax.legend(frameon=False, loc="lower right")
        figure.tight_layout()
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    text = written.getvalue()
    # Its metadata names matplotlib by addresses; the page shall have none.
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
