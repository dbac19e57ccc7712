"""Draw what searches found: memory by rank, the timetable, a rank's step, sweeps."""

from collections.abc import Sequence
from itertools import cycle

from ...pipeline.timetable import few_micro_batches, timetable
from ...runs.report.chart import COLOURS, INK, new_figure, svg_of
from ...simulation.record import StepRecord
from ...system import counted
from ..device_memory import unit_of
from ..time import PARTS
from ..time.prediction import rank_step
from .find import Found

#: Bars of one part of a step above which they are drawn as an image.
_MOST_BARS = 200


def memory_of_stages(search: Found) -> str:
    """Return SVG: the memory of each pipeline rank of the fastest layout, by kind."""
    best = search.best[0]
    figure, axes = new_figure(max(2.6, 0.9 + 0.24 * len(best.memory)))
    ranks, left = range(len(best.memory)), [0.0] * len(best.memory)
    parts = [plan.parts(best.runtime) for plan in best.memory]
    kinds = list(dict.fromkeys(kind for of_rank in parts for kind in of_rank))
    for colour, kind in zip((*COLOURS, INK), kinds, strict=False):
        sizes = [of_rank.get(kind, 0) / 1e9 for of_rank in parts]
        if any(sizes):
            axes.barh(ranks, sizes, left=left, height=0.8, color=colour, label=kind)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    room = search.request.room / 1e9
    label = f"{room:.1f} GB may be used"
    axes.axvline(room, color=COLOURS[4], linewidth=1, linestyle="--", label=label)
    axes.set_yticks(list(ranks)[:: max(1, len(ranks) // 16)])
    axes.invert_yaxis()
    axes.set_xlabel("GB")
    axes.set_ylabel("pipeline rank")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return svg_of(figure)


def timetable_of(search: Found) -> str:
    """Return SVG: when each pipeline rank of the fastest layout computes which micro-batch.

    Of a step with many micro-batches only as many are drawn as show how it begins, goes on and ends.
    """
    from ...pipeline.timetable_picture import draw_times, legend_of

    best, (drawn, axis) = search.best[0], _drawn(search)
    layout = best.choice.layout
    table = timetable(best.choice.schedule, layout, drawn, best.time.stages, best.time.sending)
    figure, axes = new_figure(min(10.0, 1.5 + 0.3 * layout.pipeline), width=12)
    draw_times(axes, table)
    axes.tick_params(colors=INK)
    axes.set_xlabel(axis)
    patches = legend_of([table])
    figure.legend(handles=patches, loc="outside upper left", ncols=len(patches), frameon=False, fontsize=10)
    return svg_of(figure)


def step_of_rank(search: Found) -> str:
    """Return SVG: what the busiest pipeline rank of the fastest layout spends a step on, over time.

    Of a step with many micro-batches only as many are drawn as show how it begins, goes on and ends.
    """
    best, (drawn, axis) = search.best[0], _drawn(search)
    spans = rank_step(best.choice.schedule, best.choice.layout, drawn, best.time)
    parts = [part for part in PARTS if any(span.part == part for span in spans)]
    figure, axes = new_figure(1.2 + 0.32 * len(parts), width=12)
    for row, (part, colour) in enumerate(zip(parts, cycle((*COLOURS, INK)))):
        bars = [(span.start, span.seconds) for span in spans if span.part == part]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour).set_rasterized(len(bars) > _MOST_BARS)
    axes.set_yticks(range(len(parts)), parts)
    axes.invert_yaxis()
    axes.set_xlim(0, spans[-1].start + spans[-1].seconds)
    axes.set_xlabel(axis)
    return svg_of(figure)


def _drawn(search: Found) -> tuple[int, str]:
    """Return how many micro-batches of the fastest layout are drawn, and the name of the axis of time."""
    choice = search.best[0].choice
    whole = choice.micro_batches(search.request.recipe.data.global_batch)
    drawn = few_micro_batches(choice.schedule, choice.layout, whole)
    return drawn, "seconds" + (f", of a step with {drawn} of {whole:,} micro-batches" * (drawn < whole))


def memory_of_step(record: StepRecord) -> str:
    """Return SVG: the most bytes in each piece of a rank's step, operator by operator, by what runs."""
    figure, axes = new_figure(3.6, width=12)
    phases, sizes = zip(*record.timeline, strict=True)
    unit, scale = unit_of(record.peak)
    for colour, phase in zip(COLOURS, dict.fromkeys(phases), strict=False):
        where = [in_piece == phase for in_piece in phases]
        x, height = range(len(sizes)), [size / scale for size in sizes]
        axes.fill_between(x, height, step="post", where=where, color=colour, label=phase, lw=0)
    axes.axhline(record.peak / scale, color=INK, linewidth=1, linestyle="--")
    axes.set_ylim(0)
    axes.set_xticks([])
    axes.set_xlabel("operators of the step, in order")
    axes.set_ylabel(unit)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return svg_of(figure)


def sweep(results: Sequence[Found]) -> str:
    """Return SVG: tokens a second of the fastest layout of each search, against GPUs or tokens of a row."""
    from matplotlib.ticker import LogLocator

    points = [
        (search.request.gpus, search.request.recipe.data.sequence_length, search.best[0].time.rate)
        for search in results
    ]
    figure, axes = new_figure(3.6)
    over_gpus = len({gpus for gpus, _, _ in points}) > 1
    lines: dict[int, list[tuple[int, float]]] = {}
    for gpus, length, rate in sorted(points):
        lines.setdefault(length if over_gpus else gpus, []).append((gpus if over_gpus else length, rate))
    for colour, (name, line) in zip(cycle(COLOURS), lines.items(), strict=False):
        label = f"{name:,} tokens of a row" if over_gpus else f"{counted(name, 'GPU')}"
        axes.plot(*zip(*line, strict=True), marker="o", color=colour, label=label)
        if over_gpus:
            (first, rate), (last, _) = line[0], line[-1]
            axes.plot([first, last], [rate, rate * last / first], ":", linewidth=1, color=colour)
    axes.set_xscale("log", base=2)
    if over_gpus:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.plot([], [], ":", linewidth=1, color=INK, label="in proportion to the GPUs")
    else:
        axes.set_ylim(0)
    ticks = sorted({x for line in lines.values() for x, _ in line})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("GPUs" if over_gpus else "tokens of a row")
    axes.set_ylabel("tokens a second")
    axes.legend(frameon=False)
    return svg_of(figure)
