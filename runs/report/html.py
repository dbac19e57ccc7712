"""Write parts of a report as HTML: the page around them, tables, parts that open; every text is escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from ...storage.small_files import read_text

#: The page around a body. Its policy lets nothing run or be fetched, even if something were not escaped.
_PAGE = Path(__file__).with_name("page.html")


def is_page_of(command: str, contents: bytes) -> bool:
    """Tell whether a file begins as a page that this command wrote."""
    mark = f'<meta name="generator" content="{command}">'
    return contents.startswith(b"<!DOCTYPE html>") and mark.encode() in contents


def whole_page(title: str, body: str, *, command: str) -> str:
    """Return the page around ``body`` (HTML), which ``command`` writes."""
    return Template(read_text(_PAGE)).substitute(command=command, title=escape(title), body=body)


def table(
    rows: Iterable[Sequence[str]],
    *,
    caption: str = "",
    head: Sequence[str] = (),
    numbers: bool = False,
    text: int | None = None,
) -> str:
    """Write an HTML table, every cell escaped, that scrolls by itself where it is wider than the page.

    A row's first cell names the row. ``text``: the only column, from 0, of which a cell may take several
    lines; by default every cell may.
    """
    wide = "" if text is None else ' class="text"'
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(
            f"<td{wide if number == text else ''}>{escape(cell)}</td>" for number, cell in enumerate(rest, 1)
        )
        + "</tr>"
        for first, *rest in rows
    )
    cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    top = f"<thead><tr>{cells}</tr></thead>" if head else ""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    kind = ' class="numbers"' if numbers else "" if text is None else ' class="lines"'
    return f'<div class="wide" tabindex="0"><table{kind}>{title}{top}<tbody>{body}</tbody></table></div>'


def folded(summary: str, content: str) -> str:
    """Write ``content`` (HTML) behind a line that opens it."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
