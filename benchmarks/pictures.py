"""Draw docs' pictures: memory of recipes, ratios of benchmarks with goals, the grid of ranks, the rooms.

python benchmarks/pictures.py; the ratios are those of results/*.json.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import fill

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from trilith.planner.dry_run import dry_run
from trilith.recipes import load_recipe

HERE = Path(__file__).resolve().parent
KINDS = {
    "weights": ("weights, stored", "#1b4965"),
    "gathered": ("weights, gathered", "#5fa8d3"),
    "gradients": ("gradients", "#62b6cb"),
    "moments": ("moments", "#bee9e8"),
    "activations": ("activations", "#f4a259"),
    "pipeline": ("exchange of stages", "#8cb369"),
    "worst": ("loss or a block's backward", "#bc4b51"),
    "runtime": ("runtime (assumed)", "#cccccc"),
}


def memory() -> None:
    plans = {path.stem: dry_run(load_recipe(path)) for path in sorted(HERE.parent.glob("recipes/*.toml"))}
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    left, names = [0.0] * len(plans), [with_machine(name) for name in plans]
    for kind, (label, color) in KINDS.items():
        sizes = []
        for plan in plans.values():
            memory = plan.rank.memory
            own = {"worst": max(memory.logits, memory.block), "runtime": plan.rank.runtime}
            sizes.append((own[kind] if kind in own else getattr(memory, kind)) / 1e9)
        axes.barh(names, sizes, left=left, label=label, color=color)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.axvline(80, color="black", linestyle=":", linewidth=1)
    axes.set_xlabel("GB on the heaviest rank at the worst moment, planned; dotted: the 80 GB of an H100")
    axes.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False)
    save(figure, axes, "memory.png")


def with_machine(name: str) -> str:
    """Return a recipe's name with its GPUs as people write them: 8 x H100."""
    model, _, gpus = name.rpartition("-")
    return f"{model}, {int(gpus.removesuffix('s').removesuffix('gpu')):,} x H100"


def speeds() -> None:
    speed("speed_training.png", ("training",))
    speed("speed_files.png", ("conversion", "resharding", "saving"))


def speed(picture: str, benchmarks: tuple[str, ...]) -> None:
    tables = [json.loads((HERE / "results" / f"{name}.json").read_text())["rows"] for name in benchmarks]
    rows = [row for table in tables for row in table if row["unit"] == "x" and row["goal"].startswith(">=")]
    figure, axes = plt.subplots(figsize=(9, 0.9 + 0.36 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        color = "#1b4965" if row["good"] else "#bc4b51"
        axes.plot([row["low"], row["high"]], [place, place], color=color, linewidth=2, alpha=0.4)
        axes.plot(row["figure"], place, "o", color=color, markersize=7)
        axes.plot(float(row["goal"].removeprefix(">= ")), place, "|", color="black", markersize=12)
    axes.axvline(1, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(
        range(len(rows)),
        [
            fill(row["name"].replace("trilith against", "against").replace(", of ", ", against "), 52)
            for row in rows
        ],
        fontsize=9,
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    axes.set_xlim(0.4, 4.5)
    axes.set_xlabel(
        "times as fast as the other: median (dot), all rounds (line), goal (bar); red: not reached",
        fontsize=9,
    )
    save(figure, axes, picture)


def grid() -> None:
    """Draw eight ranks as tensor 2 x pipeline 2 x data 2, with what each axis sends."""
    figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
    tensor, data, pipeline = "#a8323a", "#1b4965", "#9a5b00"
    places = {}
    for rank in range(8):
        t, d, p = rank % 2, rank // 2 % 2, rank // 4
        places[t, d, p] = x, y = 1.5 + 5.6 * p + 1.9 * t, 3.0 - 2.3 * d
        axes.add_patch(Rectangle((x - 0.7, y - 0.55), 1.4, 1.1, facecolor="#eef4f7", edgecolor="#1b4965"))
        axes.text(x, y + 0.22, f"rank {rank}", ha="center", va="center", fontsize=11, weight="bold")
        blocks, half = ("blocks 0-15", "blocks 16-31")[p], ("left half", "right half")[t]
        axes.text(x, y - 0.18, f"{blocks}\n{half}", ha="center", va="center", fontsize=8)

    def arrow(start: tuple[int, int, int], stop: tuple[int, int, int], color: str, bend: float = 0.0) -> None:
        (x, y), (u, v) = places[start], places[stop]
        dx, dy = (
            (0.72 if u != x else 0.0) * (1 if u > x else -1),
            (0.58 if v != y else 0.0) * (-1 if v < y else 1),
        )
        style = {"arrowstyle": "<->", "color": color, "linewidth": 2, "connectionstyle": f"arc3,rad={bend}"}
        axes.annotate("", (u - dx, v - dy), (x + dx, y + dy), arrowprops=style)

    for d in range(2):
        for p in range(2):
            arrow((0, d, p), (1, d, p), tensor)
        arrow((1, d, 0), (0, d, 1), pipeline)
    for t in range(2):
        for p in range(2):
            arrow((t, 0, p), (t, 1, p), data)
    for d, y in ((0, 3.0), (1, 0.7)):
        axes.text(0.55, y, f"rows of\ndata rank {d}", ha="right", va="center", fontsize=9)
    for p, x in ((0, 2.45), (1, 8.05)):
        axes.text(x, 3.85, f"pipeline rank {p}", ha="center", fontsize=10)
    lines = [
        (tensor, "tensor ranks share each matrix: sums of activations, four times a block and micro-batch"),
        (
            pipeline,
            "pipeline ranks share the blocks: hidden states forward, gradients back, once a micro-batch",
        ),
        (
            data,
            "data ranks share the rows: sums of gradients, once a step (ZeRO 3: weights too, block by block)",
        ),
    ]
    for place, (color, text) in enumerate(lines):
        axes.text(0.0, -0.45 - 0.38 * place, text, color=color, fontsize=9.5)
    axes.set_xlim(-0.9, 10.0)
    axes.set_ylim(-1.4, 4.2)
    axes.axis("off")
    figure.savefig(HERE.parent / "docs" / "grid.png", dpi=110)


def rooms() -> None:
    """Draw the rooms by floor, as CONTRIBUTING.md lists them."""
    text = (HERE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)/` \| (.*?) \|$", text, re.MULTILINE)
    floors: dict[int, list[str]] = {}
    for floor, room, _ in rows:
        floors.setdefault(int(floor), []).append(room)
    figure, axes = plt.subplots(figsize=(9, 5.4), layout="constrained")
    for height, floor in enumerate(sorted(floors)):
        axes.text(-0.1, height + 0.4, str(floor), ha="right", va="center", fontsize=10, color="#555555")
        width = 9.0 / len(floors[floor])
        for place, room in enumerate(floors[floor]):
            axes.add_patch(
                Rectangle(
                    (place * width, height), width - 0.08, 0.8, facecolor="#bee9e8", edgecolor="#1b4965"
                )
            )
            axes.text(place * width + width / 2, height + 0.4, room, ha="center", va="center", fontsize=11)
    top = len(floors)
    axes.annotate(
        "", (9.4, 0.2), (9.4, top - 0.4), arrowprops={"arrowstyle": "->", "color": "#bc4b51", "linewidth": 2}
    )
    axes.text(9.6, top / 2, "imports go down only", rotation=90, va="center", color="#bc4b51", fontsize=11)
    axes.set_xlim(-0.5, 9.9)
    axes.set_ylim(-0.1, top)
    axes.axis("off")
    figure.savefig(HERE.parent / "docs" / "rooms.png", dpi=110)


def save(figure: Figure, axes: Axes, name: str) -> None:
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE.parent / "docs" / name, dpi=110)


if __name__ == "__main__":
    memory()
    speeds()
    grid()
    rooms()
