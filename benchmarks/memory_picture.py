"""Draw docs/memory.png, the memory of each recipe by kind: python benchmarks/memory_picture.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from trilith.recipes import load_recipe
from trilith.training.dry_run import dry_run

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "weights": "weights, stored",
    "gathered": "weights, gathered",
    "gradients": "gradients",
    "moments": "moments",
    "activations": "activations",
    "pipeline": "exchange of stages",
    "worst": "loss or a block's backward",
    "runtime": "runtime (assumed)",
}
COLORS = ("#1b4965", "#5fa8d3", "#62b6cb", "#bee9e8", "#f4a259", "#8cb369", "#bc4b51", "#cccccc")


def main() -> None:
    plans = {path.stem: dry_run(load_recipe(path)) for path in sorted(ROOT.glob("recipes/*.toml"))}
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    left = [0.0] * len(plans)
    for (kind, label), color in zip(KINDS.items(), COLORS, strict=True):
        sizes = []
        for plan in plans.values():
            memory = plan.rank.memory
            own = {"worst": max(memory.logits, memory.block), "runtime": plan.rank.runtime}
            sizes.append((own[kind] if kind in own else getattr(memory, kind)) / 1e9)
        axes.barh(list(plans), sizes, left=left, label=label, color=color)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.axvline(80, color="black", linestyle=":", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("GB on the heaviest rank at the worst moment; dotted: the device's 80 GB")
    axes.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(ROOT / "docs" / "memory.png", dpi=110)


if __name__ == "__main__":
    main()
