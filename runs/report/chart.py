"""Draw a line chart as inline SVG: readable without colour, and described in words for screen readers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

Points = Sequence[tuple[int, float | None]]

_WIDTH, _HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 14, 34
#: More points than this are drawn as the least and the largest of each stretch of steps.
_MOST_POINTS = 600
#: Told apart by the pattern of the line, whatever the colours (which CSS gives, by number).
DASHES = ("", "7 4", "2 4", "10 4 2 4", "14 5", "1 3 6 3")


@dataclass(frozen=True)
class Series:
    """Hold one line: ``points`` (step, value), by step; ``None`` leaves a gap. ``style`` numbers its look."""

    label: str
    points: Points
    style: int
    marked: bool = False


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
        drawn = [(x, y) for series in self.series for x, y in _finite(series.points)]
        if not drawn:
            return ""
        xs, ys = [x for x, _ in drawn], [y for _, y in drawn]
        across = _Axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
        log = min(ys) > 0 and max(ys) > 1000 * min(ys)
        up = _Axis(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP, log=log, room=0.05)
        words = self.unit, "by step", "logarithmic" if log else ""
        title, description = f"{self.name}-title", f"{self.name}-description"
        return "".join(
            [
                f'<figure><figcaption>{escape(self.title)} <span class="unit">',
                f"{escape(', '.join(filter(None, words)))}</span></figcaption>",
                f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="{title} {description}">',
                f'<title id="{title}">{escape(self.title)} by step</title>',
                f'<desc id="{description}">{escape(self.description())}</desc>',
                _grid(across, up),
                *(_resume_line(across(x)) for x in self.lines if across.low <= x <= across.high),
                *(_curve(series, across, up) for series in self.series),
                "</svg>",
                self._legend(),
                "</figure>",
            ]
        )

    def description(self) -> str:
        """Return the chart in words."""
        return " ".join(_description(series) for series in self.series if _finite(series.points))

    def _legend(self) -> str:
        shown = [series for series in self.series if _finite(series.points)]
        entries = "".join(f"<li>{_sample(series)}{escape(series.label)}</li>" for series in shown)
        resumed = f"<li>{_sample(None)}resumed</li>" if self.lines else ""
        return f'<ul class="legend">{entries}{resumed}</ul>' if len(shown) > 1 or resumed else ""


def shown(value: float | None, digits: int = 4) -> str:
    """Return a number as people read it, rounded to ``digits``, thousands set apart."""
    if value is None:
        return "not finite"
    if value == 0 or 1e-3 <= abs(value) < 10**digits:
        return f"{value:.{digits}g}"
    return f"{value:,.0f}" if 1 <= abs(value) < 1e9 else f"{value:.{digits - 1}e}"


class _Axis:
    """Map numbers to places in the drawing, with round numbers as ticks."""

    def __init__(
        self, low: float, high: float, start: float, end: float, *, log: bool = False, room: float = 0.0
    ) -> None:
        self.low, self.high, self.log = low, high, log
        a, b = self._scaled(low), self._scaled(high)
        if a == b:
            a, b = a - max(abs(a) * 0.1, 0.5), b + max(abs(b) * 0.1, 0.5)
        margin = room * (b - a)
        self._a, self._b, self._start, self._end = a - margin, b + margin, start, end

    def __call__(self, value: float) -> float:
        share = (self._scaled(value) - self._a) / (self._b - self._a)
        return self._start + share * (self._end - self._start)

    def ticks(self, most: int, *, whole: bool = False) -> list[float]:
        if self.log:
            powers = range(math.ceil(self._a), math.floor(self._b) + 1)
            stride = max(1, math.ceil(len(powers) / most))
            return [10.0**power for power in powers[::stride]]
        raw = (self._b - self._a) / most
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k >= raw)
        step = max(1.0, round(step)) if whole else step
        return [step * k for k in range(math.ceil(self._a / step), math.floor(self._b / step) + 1)]

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else float(value)


def _finite(points: Points) -> list[tuple[int, float]]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _grid(across: _Axis, up: _Axis) -> str:
    parts = []
    heights = up.ticks(5)
    for value, label in zip(heights, tick_labels(heights), strict=True):
        y = up(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 5:.1f}" text-anchor="end">{label}</text>')
    for value in across.ticks(5, whole=True):
        x = across(value)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 12}" text-anchor="middle">{value:,.0f}</text>')
    return "".join(parts)


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return the labels of an axis in one notation: plain, with one letter for thousands, or as powers."""
    sizes = [abs(tick) for tick in ticks if tick]
    least, most = min(sizes, default=1.0), max(sizes, default=1.0)
    if least < 1e-3 or most / least > 1e3:
        return [_power(tick) for tick in ticks]
    for size, unit, letter in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if most >= size:
            return [f"{tick / unit:.6g}{letter}" if tick else "0" for tick in ticks]
    return [f"{tick:.6g}" for tick in ticks]


def _power(value: float) -> str:
    digits, power = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}" if value else "0"


def _resume_line(x: float) -> str:
    return f'<line class="resumed" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'


def _curve(series: Series, across: _Axis, up: _Axis) -> str:
    style = (
        f'class="curve c{series.style % len(DASHES)}" stroke-dasharray="{DASHES[series.style % len(DASHES)]}"'
    )
    pieces: list[list[str]] = [[]]
    for x, y in thinned(series.points):
        if y is None or not math.isfinite(y):
            pieces.append([])
        else:
            pieces[-1].append(f"{across(x):.1f},{up(y):.1f}")
    parts = [f'<polyline {style} points="{" ".join(piece)}"/>' for piece in pieces if len(piece) > 1]
    alone = [piece[0] for piece in pieces if len(piece) == 1]
    dots = [f"{across(x):.1f},{up(y):.1f}" for x, y in _finite(series.points)] if series.marked else alone
    for dot in dots[:: max(1, len(dots) // 60)]:
        x_at, y_at = dot.split(",")
        parts.append(f'<circle class="dot c{series.style % len(DASHES)}" cx="{x_at}" cy="{y_at}" r="4"/>')
    return "".join(parts)


def thinned(points: Points) -> list[tuple[int, float | None]]:
    """Return at most about ``_MOST_POINTS`` points with every peak: the extremes of each stretch."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    extremes: list[tuple[int, float | None]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        finite = _finite(part)
        if len(finite) < len(part):
            extremes.append((part[0][0], None))
        if finite:
            ends = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
            extremes.extend(sorted(ends))
    return extremes


def _sample(series: Series | None) -> str:
    """Return a short piece of the line, for the legend."""
    start = '<svg class="sample" viewBox="0 0 36 12" aria-hidden="true">'
    if series is None:
        return f'{start}<line class="resumed" x1="18" x2="18" y1="0" y2="12"/></svg>'
    number = series.style % len(DASHES)
    dot = f'<circle class="dot c{number}" cx="18" cy="6" r="4"/>' if series.marked else ""
    line = f'<line class="curve c{number}" stroke-dasharray="{DASHES[number]}" x1="0" x2="36" y1="6" y2="6"/>'
    return f"{start}{line}{dot}</svg>"


def _description(series: Series) -> str:
    points = _finite(series.points)
    low, high = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    first, last, least, most = (f"{shown(y)} at step {x}" for x, y in (points[0], points[-1], low, high))
    return f"{series.label}: from {first} to {last}; least {least}, largest {most}."
