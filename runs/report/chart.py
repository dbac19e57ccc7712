"""Draw figures that stand on pages of light and dark paper as inline SVG. A line chart is readable without
colour, and described in words for screen readers.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

Points = Sequence[tuple[int, float | None]]

#: Colours that can be read on light and dark paper, and that of text.
COLOURS = ("#3b82c4", "#b0802f", "#4d9a5b", "#a05195", "#c2544f", "#3aa0a0", "#8a8f3c", "#7a6fd0", "#8a6d5b")
INK = "#7a8088"

#: Of more marks than this every n-th is drawn.
_MOST_MARKS = 60
#: Told apart by the pattern of the line, whatever the colours.
DASHES = ((1, 0), (7, 4), (2, 4), (10, 4, 2, 4), (14, 5), (1, 3, 6, 3))


def new_figure(height: float, *, width: float = 8) -> tuple[Any, Any]:
    """Return a figure, whose size is in inches, and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Text stays text: it can be searched, and needs no font of this machine.
    matplotlib.rcParams.update({"svg.fonttype": "none", "text.color": INK, "axes.labelcolor": INK})
    # What is closer than a pixel is drawn as one stroke, with its peaks: a long run's page stays small.
    matplotlib.rcParams["path.simplify_threshold"] = 1.0
    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.tick_params(colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    return figure, axes


def svg_of(figure: Any, name: str | None = None) -> str:
    """Return the figure as an element of a page, and close it. Nothing in it names an address.

    With ``name``, which no other figure of the page has, it is the same text each time.
    """
    import matplotlib
    from matplotlib import pyplot

    svg = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    text = svg.getvalue()
    addresses = r"<metadata>.*?</metadata>| xmlns(?::xlink)?=\"[^\"]*\""
    return re.sub(addresses, "", text[text.index("<svg") :], flags=re.DOTALL)


@dataclass(frozen=True)
class Series:
    """Hold one line: ``points`` (step, value), by step; ``None`` leaves a gap. ``style`` numbers its look."""

    label: str
    points: Points
    style: int
    marked: bool = False

    @property
    def look(self) -> tuple[str, tuple[int, ...]]:
        """Return the colour and the dashes of the line."""
        number = self.style % len(DASHES)
        return COLOURS[number], DASHES[number]


@dataclass(frozen=True)
class Chart:
    """Describe a chart. ``name`` is unique on the page. ``lines``: steps at which the run was resumed."""

    name: str
    title: str
    unit: str
    series: Sequence[Series]
    lines: Sequence[int] = field(default=())

    def svg(self) -> str:
        """Return the whole figure, or nothing if there is no number to draw."""
        drawn = [series for series in self.series if _finite(series.points)]
        if not drawn:
            return ""
        ys = [y for series in drawn for _, y in _finite(series.points)]
        log = min(ys) > 0 and max(ys) > 1000 * min(ys)
        words = ", ".join(filter(None, (self.unit, "by step", "logarithmic" if log else "")))
        entries = "".join(f"<li>{_sample(series)}{escape(series.label)}</li>" for series in drawn)
        resumed = f"<li>{_sample(None)}resumed</li>" if self.lines else ""
        legend = f'<ul class="legend">{entries}{resumed}</ul>' if drawn[1:] or resumed else ""
        caption = f'{escape(self.title)} <span class="unit">{escape(words)}</span>'
        # One element to screen readers, which read its words; the names within are not unique on the page.
        picture = re.sub(r' id="[\w.]+_\d+"', "", svg_of(_drawn(drawn, self.lines, log=log), self.name))
        label = escape(f"{self.title} by step. {self.description()}")
        picture = picture.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
        return f"<figure><figcaption>{caption}</figcaption>{picture}{legend}</figure>"

    def description(self) -> str:
        """Return the chart in words."""
        return " ".join(_description(series) for series in self.series if _finite(series.points))


def _drawn(drawn: Sequence[Series], lines: Sequence[int], *, log: bool) -> Any:
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(2.7, width=4.8)
    for series in drawn:
        _draw(axes, series)
    low, high = axes.get_xlim()
    for step in lines:
        if low <= step <= high:
            axes.axvline(step, color=INK, linestyle=":")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if log:
        axes.set_yscale("log")
    axes.grid(axis="y", color=INK, alpha=0.25)
    return figure


def _draw(axes: Any, series: Series) -> None:
    """Draw a line with gaps; with a mark at each point, or only where a point has no neighbour."""
    xs, ys = zip(*series.points, strict=True)
    finite = np.isfinite(heights := np.array(ys, dtype=float))
    padded = np.pad(finite, 1)
    marks = np.flatnonzero(finite if series.marked else finite & ~padded[:-2] & ~padded[2:])
    colour, dashes = series.look
    axes.plot(
        xs, heights, color=colour, linestyle=(0, dashes), marker="o", markersize=4,
        markevery=marks[:: max(1, len(marks) // _MOST_MARKS)].tolist(),
    )  # fmt: skip


def shown(value: float | None, digits: int = 4) -> str:
    """Return a number as people read it, rounded to ``digits``, thousands set apart."""
    if value is None:
        return "not finite"
    if value == 0 or 1e-3 <= abs(value) < 10**digits:
        return f"{value:.{digits}g}"
    return f"{value:,.0f}" if 1 <= abs(value) < 1e9 else f"{value:.{digits - 1}e}"


def _finite(points: Points) -> list[tuple[int, float]]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _sample(series: Series | None) -> str:
    """Return a short piece of the line, for the legend."""
    colour, dashes = (INK, (2, 2)) if series is None else series.look
    way = 'x1="18" x2="18" y1="0" y2="12"' if series is None else 'x1="0" x2="36" y1="6" y2="6"'
    line = f'<line {way} stroke="{colour}" stroke-width="2" stroke-dasharray="{" ".join(map(str, dashes))}"/>'
    dot = f'<circle cx="18" cy="6" r="4" fill="{colour}"/>' if series is not None and series.marked else ""
    return f'<svg class="sample" viewBox="0 0 36 12" aria-hidden="true">{line}{dot}</svg>'


def _description(series: Series) -> str:
    points = _finite(series.points)
    low, high = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    first, last, least, most = (f"{shown(y)} at step {x}" for x, y in (points[0], points[-1], low, high))
    return f"{series.label}: from {first} to {last}; least {least}, largest {most}."
