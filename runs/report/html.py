"""Write parts of a report as HTML: the page around them, tables, parts that open; every text is escaped."""

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root { --paper: #fff; --ink: #1a1c1f; --soft: #565b63; --rule: #d9dce1; --card: #f6f7f9;
  --c0: #0b57c2; --c1: #b34700; --c2: #0a7350; --c3: #8330b0; --c4: #a1253f; --c5: #5c5400; }
@media (prefers-color-scheme: dark) { :root { --paper: #14161a; --ink: #eceef1; --soft: #a9b0ba;
  --rule: #363b44; --card: #1d2026;
  --c0: #7fb2ff; --c1: #ffab70; --c2: #63d3a4; --c3: #d5a6ff; --c4: #ff9aac; --c5: #ddd06a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin-top: 2rem;
  overflow-wrap: anywhere; }
.charts { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; padding: 12px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; }
figcaption { font-weight: 600; } .unit { font-weight: 400; color: var(--soft); }
figure > svg { display: block; width: 100%; height: auto; max-width: 640px; }
figure.broad > svg { max-width: none; }
svg text { font: 15px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--rule); } .resumed { stroke: var(--soft); stroke-dasharray: 3 3; stroke-width: 1.5; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; } .dot { stroke: var(--card); stroke-width: 1; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); }
.dot.c0 { fill: var(--c0); } .dot.c1 { fill: var(--c1); } .dot.c2 { fill: var(--c2); }
.dot.c3 { fill: var(--c3); } .dot.c4 { fill: var(--c4); } .dot.c5 { fill: var(--c5); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0 0; padding: 0; list-style: none;
  font-size: .875rem; overflow-wrap: anywhere; }
.sample { width: 36px; height: 12px; margin-right: 6px; vertical-align: middle; }
.wide { overflow-x: auto; margin: 12px 0; }
table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; font-weight: 600; padding: 4px 0; }
th, td { text-align: left; vertical-align: top; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: anywhere; min-width: 5em; }
thead th { overflow-wrap: normal; }
tbody th { font-weight: 400; color: var(--soft); overflow-wrap: break-word; }
.numbers th, .numbers td { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.lines td, .lines th { white-space: nowrap; min-width: 0; overflow-wrap: normal; }
.lines .text { white-space: normal; min-width: 18em; }
summary { cursor: pointer; padding: 6px 0; font-weight: 600; }
@media print { details > * { display: block; } }
"""


#: Even if something were not escaped, the policy lets nothing run and nothing be fetched.
_FRAME = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">{mark}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,"><title>{title}</title><style>{style}</style></head>
<body><main>{body}</main></body></html>
"""


def is_page_with(mark: str, seen: bytes) -> bool:
    """Tell whether a file begins as a page with this mark, see ``whole_page``."""
    return seen.startswith(b"<!DOCTYPE html>") and mark.encode() in seen


def whole_page(title: str, body: str, *, mark: str) -> str:
    """Return the page around ``body`` (HTML). ``mark``: a line of its head by which such a page is known."""
    return _FRAME.format(mark=mark, title=escape(title), style=STYLE, body=body)


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
