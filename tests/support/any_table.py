"""Write what ``any_model`` has proved: ``proved.toml`` of the package, and its part of docs/any_model.md."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

import trilith
from trilith.models import FAMILIES
from trilith.models.from_transformers.config import AXES
from trilith.recipes.recipe_text import to_toml
from trilith.storage.small_files import read_toml

from support.any_model import LAYOUTS

ROOT = Path(trilith.__file__).parent
TABLE, PAGE = ROOT / "models/from_transformers/proved.toml", ROOT / "docs/any_model.md"
BEGIN = "\n## What is proved\n"
#: Columns of the page: axes, and layouts of the axis that each type must have.
COLUMNS = ("transformers", "gradients", "zoo", *LAYOUTS)


def toml(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of the package."""
    lines = [to_toml({kind: row})[2:-2] for kind, row in sorted(rows.items())]  # without the braces
    return f"""# Written by `make any-model`: what is proved of each type of transformers that makes text, as
# largest relative differences, and why no more.
transformers = "{version("transformers")}"

[types]
{chr(10).join(lines)}
"""


def row_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of the table for a line of JSON that ``any_model`` wrote."""
    refused: Mapping[str, str] = said["refused"]
    # Data parallelism is the least that a type must have.
    if whole := refused.get("all") or refused.get("data") or refused.get("ZeRO 0"):
        return {"refused": line(whole)}
    why = {axis: cause(line(reason)) for axis, reason in refused.items() if axis in AXES}
    proved = {axis: float(f"{gap:.0e}") for axis, gap in said["proved"].items()}
    return {"proved": proved} | ({"why": why} if why else {})


def line(text: str) -> str:
    """Return a reason without what differs from run to run."""
    if "did not answer" in text:
        return "its ranks did not finish two steps in time"
    if "config here is not tiny" in text or "config.json: expected what transformers' " in text:
        return "no test has tried it: none knows a tiny config of it"
    return shorten(text.partition("\n")[0].removeprefix("failed: "), 200, placeholder=" ...")


def cause(text: str) -> str:
    """Return a reason that says of an error whose it is."""
    return f"its code fails when it is cut ({text})" if re.match(r"[A-Z]\w*Error: ", text) else text


def page(table: Mapping[str, Any]) -> str:
    """Return the part of the page."""
    rows = table["types"]
    passed = {kind: row for kind, row in rows.items() if "refused" not in row}
    outside = passed.keys() - FAMILIES.keys()
    counts = Counter(axis for row in passed.values() for axis in row["proved"])
    shown = ", ".join(f"{counts[axis]} {axis}" for axis in AXES if counts[axis])
    text = f"""{BEGIN}
<!-- proved -->
Of the {len(rows)} types of transformers {table["transformers"]} that make text, some of them from images too,
{len(passed)} pass at a tiny size, {len(outside)} outside the zoo; of these {len(passed)} the axes: {shown}.

A number is the largest relative difference in fp64 (code that casts to fp32 inside runs in fp64 there): of
logits, and of loss and gradients, to transformers on one device; of loss and gradients to the zoo's own
model, if the zoo has the family, from the same file, which both write back alike; and of losses, gradients
and weights after two steps in the layout to one process. `-`: not tried, or refused for the reason below
the table.

| type | {" | ".join(COLUMNS)} |
|{"---|" * (len(COLUMNS) + 1)}
"""
    for kind, row in passed.items():
        cells = [f"{row['proved'][column]:.0e}" if column in row["proved"] else "-" for column in COLUMNS]
        text += f"| `{kind}` | {' | '.join(cells)} |\n"
    text += "\nRefused axes:\n\n"
    reasons: dict[str, list[str]] = {}
    for kind, row in passed.items():
        for axis, why in row.get("why", {}).items():
            reasons.setdefault(f"{axis}: {why}", []).append(f"`{kind}`")
    text += "".join(f"- {why}: {', '.join(kinds)}\n" for why, kinds in sorted(reasons.items()))
    text += "\nTypes refused whole:\n\n"
    text += "".join(f"- `{kind}`: {row['refused']}\n" for kind, row in rows.items() if "refused" in row)
    return text


def written(before: str, table: Mapping[str, Any]) -> str:
    """Return the text of the page, with its part anew."""
    return before.partition(BEGIN)[0].rstrip("\n") + "\n" + page(table).rstrip("\n") + "\n<!-- end -->\n"


def main() -> None:
    """Put the lines of JSON that ``any_model`` wrote into both; types that it did not try stay."""
    rows = dict(read_toml(TABLE)["types"])
    for file in sys.argv[1:]:
        for text in Path(file).read_text(encoding="utf-8").splitlines():
            row = json.loads(text)
            rows[row["kind"]] = row_of(row)
    TABLE.write_text(toml(rows), encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), read_toml(TABLE)), encoding="utf-8")


if __name__ == "__main__":
    main()
