"""Draw docs/speed.png, the ratios that have goals, from results/*.json: python benchmarks/speed_picture.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
#: Benchmarks whose figures are "how many times as fast", from top to bottom.
DRAWN = ("training", "conversion", "resharding", "saving")
REACHED, MISSED = "#1b4965", "#bc4b51"


def main() -> None:
    rows = [row for name in DRAWN for row in goals_of(name)]
    figure, axes = plt.subplots(figsize=(9, 0.5 + 0.24 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        color = REACHED if row["good"] else MISSED
        axes.plot([row["low"], row["high"]], [place, place], color=color, linewidth=1, alpha=0.5)
        axes.plot(row["figure"], place, "o", color=color, markersize=5)
        axes.plot(float(row["goal"].removeprefix(">= ")), place, "|", color="black", markersize=9)
    axes.axvline(1, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    axes.set_xlim(0.4, 4.5)
    axes.invert_yaxis()
    axes.set_xlabel(
        "times as fast as the other: median (dot), all rounds (line), goal (bar); red: not reached",
        fontsize=8,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(HERE.parent / "docs" / "speed.png", dpi=110)


def goals_of(name: str) -> list[dict[str, Any]]:
    """Return the rows of one benchmark that compare speeds and have a goal."""
    found = json.loads((HERE / "results" / f"{name}.json").read_text())["rows"]
    return [row for row in found if row["unit"] == "x" and row["goal"].startswith(">=")]


if __name__ == "__main__":
    main()
