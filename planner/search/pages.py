"""Write what searches found, or a simulated step, as one HTML page: no script, no other file, no network."""

import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import cycle

from ...pipeline.timetable import few_micro_batches, timetable
from ...runs.report.chart import COLOURS, INK, new_figure, svg_of
from ...runs.report.html import folded, table, whole_page
from ...simulation.ledger import StepRecord
from ...system import counted
from ..memory import unit_of
from ..time import PARTS
from ..time.prediction import rank_step
from .find import Found
from .report import (
    HEAD,
    asked,
    asked_in_sweep,
    facts,
    found_ones,
    left_out,
    recipe_toml,
    rows,
    searched,
    sweep_head,
    sweep_rows,
    sweep_warnings,
)  # fmt: skip
from .strategy import reasons

#: Bars of one part of a step above which they are drawn as an image.
_MOST_BARS = 200
#: Modules that are listed: the largest holders.
_MOST = 12
#: The head of a table, and its rows.
Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


def make_page(search: Found) -> str:
    """Return the page of one search."""
    request = search.request
    sentences = [asked(request), *reasons(search)]
    sentences += [f"{word[0].upper()}{word[1:]}: {line}." for word, line in facts(search)]
    body = [
        f"<h1>Layouts of {escape(request.name)}</h1>",
        "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences),
        "<h2>The fastest layouts</h2>",
        table(rows(search), head=HEAD, text=1),
        "<p>Seconds are those of a step, waits the share of it in which a pipeline rank is idle, "
        "and GB those of the heaviest rank.</p>",
        "<h2>Memory of the fastest layout</h2>",
        f"<figure><figcaption>By pipeline rank</figcaption>{memory_of_stages(search)}</figure>",
        *_schedule(search),
        "<h2>Step of the fastest layout</h2>",
        '<figure class="broad"><figcaption>What the busiest rank spends a step on</figcaption>'
        f"{step_of_rank(search)}</figure>",
        "<p>Exchanges are drawn as far as nothing is computed beside them. Inside a forward or a backward "
        "the parts follow each other here; in truth each block has its own.</p>",
        "<h2>The other layouts</h2>",
        f"<p>Ruled out: {escape(searched(search))}.</p>",
        table(left_out(search), head=("", "reason", "layouts", "example")),
        folded("The recipe", f"<pre>{escape(recipe_toml(search))}</pre>"),
    ]
    return whole_page(f"trilith plan {request.name}", "".join(body), command="trilith plan")


def _schedule(search: Found) -> list[str]:
    best = search.best[0]
    if best.choice.layout.pipeline == 1:
        return []
    return [
        "<h2>Timetable of the fastest layout</h2>",
        f'<figure class="broad"><figcaption>When each pipeline rank computes</figcaption>'
        f"{timetable_of(search)}</figure>",
    ]


def make_sweep_page(results: Sequence[Found]) -> str:
    """Return the page of several searches: how tokens a second grow with GPUs or tokens of a row."""
    searches = found_ones(results)
    sentences = [f"Warning: {line}." for line in sweep_warnings(results)]
    sentences += [f"{search.error}." for search in results if search.error is not None]
    name = searches[0].request.name
    body = [
        f"<h1>Layouts of {escape(name)}</h1>",
        f"<p>{escape(asked_in_sweep([search.request for search in results]))}</p>",
        f"<figure><figcaption>Tokens a second of the fastest layouts</figcaption>{sweep(searches)}</figure>",
        table(sweep_rows(results), head=sweep_head(results), text=3),
        "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences),
    ]
    return whole_page(f"trilith plan {name}", "".join(body), command="trilith plan")


def kinds_of_bytes(record: StepRecord) -> Rows:
    """Return the bytes at the worst moment by kind, the largest first."""
    unit, scale = unit_of(record.peak)
    return ("kind", unit, "share"), [
        (kind, f"{size / scale:,.2f}", f"{size / record.peak:.1%}")
        for kind, size in record.kinds.items()
        if size >= record.peak / 1000
    ]


def largest_holders(record: StepRecord) -> Rows:
    """Return the largest holders at the worst moment. Blocks are counted together: ``layers.*``."""
    unit, scale = unit_of(record.peak)
    sizes = Counter[tuple[str, str, str, str]]()
    for holder in record.holders:
        module = re.sub(r"\.\d+(?=\.|$)", ".*", holder.module)
        sizes[holder.kind, module, holder.phase, holder.operator.removeprefix("aten::")] += holder.bytes
    rows: list[tuple[str, ...]] = [(*key, f"{size / scale:,.2f}") for key, size in sizes.most_common(_MOST)]
    return ("kind", "module", "made in", "by", unit), rows


def exact_line(record: StepRecord, planned: int) -> str:
    """Return the exact peak beside the planned one, in one line; ``planned``: bytes, without the runtime."""
    unit, scale = unit_of(record.peak)
    phase = max(record.timeline, key=lambda piece: piece[1])[0]
    return (
        f"{record.peak / scale:,.3f} {unit} of tensors at the worst moment, in the {phase}; the plan says "
        f"{planned / scale:,.3f} ({planned / record.peak - 1:+.2%})"
    )


def make_step_page(name: str, record: StepRecord, planned: int) -> str:
    """Return a page, HTML without scripts: a picture of the step's memory, and tables of who holds it."""
    (kinds_head, kinds), (holders_head, holders) = kinds_of_bytes(record), largest_holders(record)
    body = [
        f"<h1>Memory of rank {record.rank} of {escape(name)}</h1>",
        f"<p>{escape(exact_line(record, planned))}.</p>",
        "<p>One step of the rank ran on a simulated device: the program, not compiled, with tensors that "
        f"have shapes and no numbers, and the kernels of a {record.kernels.upper()}. What is in no tensor "
        "(the runtime, communicators, workspaces of kernels) is not counted.</p>",
        f'<figure class="broad"><figcaption>Bytes alive during the step</figcaption>{memory_of_step(record)}'
        "</figure>",
        "<h2>At the worst moment, by kind</h2>",
        table(kinds, head=kinds_head, text=1),
        "<h2>The largest holders</h2>",
        "<p>Blocks are counted together (*).</p>",
        table(holders, head=holders_head, text=4),
    ]
    return whole_page(f"memory of {name}", "".join(body), command="trilith train --dry-run")


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
