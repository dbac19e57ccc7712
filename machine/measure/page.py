"""Write a report as one HTML page: tables, no script, no other file, no network."""

from collections.abc import Sequence
from html import escape
from typing import Any

from ...runs.report.html import folded, table, whole_page
from .cases import PARTS
from .run import Report, Row


def make_page(report: Report) -> str:
    """Return the page of a report."""
    body = [
        "<h1>trilith bench</h1>",
        table([[key, _text(value)] for key, value in report.machine.items()], caption="Machine"),
    ]
    for part, title in PARTS.items():
        rows = [row for row in report.rows if row.part == part]
        if rows:
            body += [f"<h2>{escape(title)}</h2>", _part(rows)]
    findings = ([finding.level, finding.check, finding.found, finding.todo] for finding in report.doctor)
    body += ["<h2>Doctor</h2>", table(findings, head=("", "check", "found", "what to do"))]
    return whole_page("trilith bench", "".join(body), command="trilith bench")


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
