"""Tables of a report: every cell is escaped here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(
    rows: Iterable[Sequence[str]], *, caption: str = "", head: Sequence[str] = (), numbers: bool = False
) -> str:
    """An HTML table that scrolls by itself where it is wider than the page. A row's first cell names it."""
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    top = f"<thead><tr>{cells}</tr></thead>" if head else ""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    kind = ' class="numbers"' if numbers else ""
    return f'<div class="wide" tabindex="0"><table{kind}>{title}{top}<tbody>{body}</tbody></table></div>'


def folded(summary: str, content: str) -> str:
    """``content`` (HTML) behind a line that opens it."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
