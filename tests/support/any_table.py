"""Write what ``any_model`` has proved: ``proved.toml`` of the package, and its part of docs/any_model.md."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import trilith
from trilith.models import FAMILIES
from trilith.models.from_transformers.proved import AXES

ROOT = Path(trilith.__file__).parent
BEGIN = "\n## What is proved\n"
#: Columns of the page: axes, and layouts of the axis that each type must have.
COLUMNS = ("transformers", "gradients", "data", "ZeRO 0", "tensor", "sequence", "pipeline", "context")


def toml(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the package."""
    lines = [
        "# Written by `make models`: what is proved of each causal type of transformers, and why no more."
    ]
    lines += [f'transformers = "{version("transformers")}"', ""]
    for row in sorted(rows, key=lambda row: str(row["kind"])):
        lines.append(f'[types."{row["kind"]}"]')
        if refused := whole(row):
            lines += [f"refused = {json.dumps(line(refused))}", ""]
            continue
        lines.append(f"axes = {json.dumps([axis for axis in AXES if axis in row['proved']])}")
        lines += [
            f"why.{axis} = {json.dumps(line(why))}" for axis, why in row["refused"].items() if axis in AXES
        ]
        lines.append("")
    return "\n".join(lines)


def whole(row: Mapping[str, Any]) -> str:
    """Return why a type is refused whole: data parallelism is the least that it must have."""
    refused: Mapping[str, str] = row["refused"]
    return refused.get("all") or refused.get("data") or refused.get("ZeRO 0") or ""


def line(text: str) -> str:
    """Return a reason without what differs from run to run."""
    if "did not answer" in text:
        return "its ranks did not finish two steps in time"
    return text.partition("\n")[0].removeprefix("failed: ")[:200]


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the part of the page."""
    passed = [row for row in rows if not whole(row)]
    outside = [row for row in passed if row["kind"] not in FAMILIES]
    counts = Counter(axis for row in passed for axis in row["proved"])
    shown = ", ".join(f"{counts[axis]} {axis}" for axis in AXES if counts[axis])
    text = f"""{BEGIN}
<!-- proved -->
Of the {len(rows)} causal types of transformers {version("transformers")}, {len(passed)} pass at a tiny size,
{len(outside)} of them outside the zoo; of these {len(passed)} the axes that pass: {shown}.

A number is the largest relative difference in fp64 (code that casts to fp32 inside runs in fp64 there): of
logits and gradients to transformers on one device, and of losses, gradients and weights after two steps in
the layout to one process. `-`: refused, for the reason below the table.

| type | {" | ".join(COLUMNS)} |
|{"---|" * (len(COLUMNS) + 1)}
"""
    for row in passed:
        cells = [f"{row['proved'][column]:.0e}" if column in row["proved"] else "-" for column in COLUMNS]
        text += f"| `{row['kind']}` | {' | '.join(cells)} |\n"
    text += "\nRefused axes:\n\n"
    reasons: dict[str, list[str]] = {}
    for row in passed:
        for axis, why in row["refused"].items():
            reasons.setdefault(f"{axis}: {line(why)}", []).append(f"`{row['kind']}`")
    text += "".join(f"- {why}: {', '.join(kinds)}\n" for why, kinds in sorted(reasons.items()))
    text += "\nTypes refused whole:\n\n"
    text += "".join(f"- `{row['kind']}`: {line(whole(row))}\n" for row in rows if whole(row))
    return text


def main() -> None:
    """Write both from the lines of JSON that ``any_model`` wrote; later lines of a type win."""
    rows: dict[str, Mapping[str, Any]] = {}
    for file in sys.argv[1:]:
        for text in Path(file).read_text(encoding="utf-8").splitlines():
            row = json.loads(text)
            rows[row["kind"]] = row
    ordered = [rows[kind] for kind in sorted(rows)]
    (ROOT / "models/from_transformers/proved.toml").write_text(toml(ordered), encoding="utf-8")
    models = ROOT / "docs/any_model.md"
    before = models.read_text(encoding="utf-8").partition(BEGIN)[0]
    models.write_text(
        before.rstrip("\n") + "\n" + page(ordered).rstrip("\n") + "\n<!-- end -->\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
