"""Draw docs/memory.png, the memory of each recipe by kind, and docs/speed.png, the ratios that have goals.

python benchmarks/pictures.py; the ratios are those of results/*.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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
#: Benchmarks whose figures are "how many times as fast", from top to bottom.
DRAWN = ("training", "conversion", "resharding", "saving")


def memory() -> None:
    plans = {path.stem: dry_run(load_recipe(path)) for path in sorted(HERE.parent.glob("recipes/*.toml"))}
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    left = [0.0] * len(plans)
    for kind, (label, color) in KINDS.items():
        sizes = []
        for plan in plans.values():
            memory = plan.rank.memory
            own = {"worst": max(memory.logits, memory.block), "runtime": plan.rank.runtime}
            sizes.append((own[kind] if kind in own else getattr(memory, kind)) / 1e9)
        axes.barh(list(plans), sizes, left=left, label=label, color=color)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.axvline(80, color="black", linestyle=":", linewidth=1)
    axes.set_xlabel("GB on the heaviest rank at the worst moment; dotted: the device's 80 GB")
    axes.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False)
    save(figure, axes, "memory.png")


def speed() -> None:
    tables = [json.loads((HERE / "results" / f"{name}.json").read_text())["rows"] for name in DRAWN]
    rows = [row for one in tables for row in one if row["unit"] == "x" and row["goal"].startswith(">=")]
    figure, axes = plt.subplots(figsize=(9, 0.5 + 0.24 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        color = "#1b4965" if row["good"] else "#bc4b51"
        axes.plot([row["low"], row["high"]], [place, place], color=color, linewidth=1, alpha=0.5)
        axes.plot(row["figure"], place, "o", color=color, markersize=5)
        axes.plot(float(row["goal"].removeprefix(">= ")), place, "|", color="black", markersize=9)
    axes.axvline(1, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    axes.set_xlim(0.4, 4.5)
    told = "times as fast as the other: median (dot), all rounds (line), goal (bar); red: not reached"
    axes.set_xlabel(told, fontsize=8)
    save(figure, axes, "speed.png")


def save(figure: Figure, axes: Axes, name: str) -> None:
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE.parent / "docs" / name, dpi=110)


if __name__ == "__main__":
    memory()
    speed()
