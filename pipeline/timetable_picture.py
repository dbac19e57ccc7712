"""Draw a timetable: when each rank computes which micro-batch, how long it waits, how much it holds."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch

from ..parallel_state import require
from ..storage.output_places import check_output_file
from ..storage.staging import output_file
from .schedule_actions import Kind
from .timetable import Timetable

FORMATS = (".png", ".svg", ".pdf")
#: In each picture's metadata: by which it is known as one of ours.
_MARK = "trilith schedule"

#: Bars of a rank above which they are drawn as an image.
_MOST_BARS = 100
#: Inches that a digit of a bar's number takes.
_DIGIT = 0.06
COLORS: dict[Kind, str] = {"F": "#5fa8d3", "B": "#4d7c3a", "I": "#8cb369", "W": "#f4a259"}
MEANING: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward, for the input",
    "W": "backward, for the weights",
}


def check_picture(out: Path, *, force: bool = False) -> None:
    """Refuse a file that ``draw_timetable`` would not write, before anything is computed for it."""
    require(out.suffix in FORMATS, "schedule", "--out", f"a name that ends in {', '.join(FORMATS)}", str(out))
    check_output_file(out, ours=_is_picture, force=force)


def _is_picture(contents: bytes) -> bool:
    return contents.startswith((b"\x89PNG", b"<?xml", b"%PDF")) and _MARK.encode() in contents


def draw_timetable(out: Path, title: str, table: Timetable, *, force: bool = False) -> None:
    """Write a picture, in one of ``FORMATS``, of a step's timetable.

    ``BadInput`` for a file that exists and is no such picture, unless ``force``.
    """
    matplotlib.use("Agg")
    width = min(24, max(11, 3 + 0.27 * max(map(len, table.ranks))))
    size = width, 2.3 + 0.42 * len(table.ranks)
    figure, (times, sums) = plt.subplots(1, 2, figsize=size, width_ratios=(6, 0.9), layout="constrained")
    draw_times(times, table)
    times.set_title(f"{table.bubble:.1%} of the step is waiting", loc="left", fontsize=10)
    times.set_xlabel("units of a stage's forward", fontsize=9)
    _draw_sums(sums, table)
    legend = legend_of([table])
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.legend(handles=legend, loc="outside lower left", ncols=len(legend), fontsize=9, frameon=False)
    kind, key = out.suffix.removeprefix("."), "Software" if out.suffix == ".png" else "Creator"
    with output_file(out, ours=_is_picture, force=force) as path:
        figure.savefig(path, dpi=120, format=kind, metadata={key: _MARK})
    plt.close(figure)


def legend_of(tables: Collection[Timetable]) -> list[Patch]:
    """Return what the colours in pictures of these timetables mean."""
    kinds = {timed.action.kind for table in tables for rank in table.ranks for timed in rank}
    patches = [Patch(facecolor=COLORS[kind], label=MEANING[kind]) for kind in MEANING if kind in kinds]
    if any(table.layout.virtual_stages > 1 for table in tables):
        patches.append(Patch(facecolor=to_rgba("#555555", 0.5), label="paler: a rank's later stages"))
    return patches


def draw_times(axes: Any, table: Timetable) -> None:
    """Draw a bar for each action, with its micro-batch's number if it fits; a rank's later stages are paler.

    So many bars that numbers would not fit become one image, also in a picture that is otherwise lines.
    """
    whole, several = table.length, table.layout.virtual_stages
    digit = _DIGIT * whole / (0.7 * axes.figure.get_figwidth())
    for rank, row in enumerate(table.ranks):
        stages = table.layout.stages_of(rank)
        pale = {stage: 1 - 0.5 * later / max(1, several - 1) for later, stage in enumerate(stages)}
        bars = axes.broken_barh(
            [(timed.start, timed.stop - timed.start) for timed in row],
            (rank - 0.43, 0.86),
            facecolors=[to_rgba(COLORS[timed.action.kind], pale[timed.action.stage]) for timed in row],
            edgecolor="white",
            linewidth=0.6 if len(row) <= _MOST_BARS else 0,
        )
        bars.set_rasterized(len(row) > _MOST_BARS)
        for timed in row:
            number = str(timed.action.micro_batch)
            if timed.stop - timed.start > digit * len(number):
                axes.text(
                    (timed.start + timed.stop) / 2, rank, number, ha="center", va="center",
                    fontsize=6.5, color="#222222",
                )  # fmt: skip
    axes.set_yticks(range(len(table.ranks)), [f"rank {rank}" for rank in range(len(table.ranks))], fontsize=9)
    axes.set_xlim(0, whole)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_facecolor("#f4f4f4")
    axes.spines[:].set_visible(False)


def _draw_sums(axes: Any, table: Timetable) -> None:
    """Draw each rank's waiting as a bar, and what it holds at once as a number."""
    ranks = range(len(table.ranks))
    idle = [table.idle(rank) for rank in ranks]
    axes.barh(ranks, idle, height=0.5, color="#bc4b51")
    most = max(0.1, 1.5 * max(idle))
    for rank in ranks:
        axes.text(idle[rank] + 0.02 * most, rank, f"{idle[rank]:.1%}", va="center", fontsize=8)
        axes.text(most * 1.05, rank, str(table.most_held(rank)), va="center", ha="left", fontsize=9)
    axes.text(most * 1.05, -0.75, "held", ha="right", fontsize=9)
    axes.set_title("waiting", loc="left", fontsize=10)
    axes.set_xlim(0, most)
    axes.set_ylim(len(table.ranks) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
