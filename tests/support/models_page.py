"""Write docs/models.md, the largest difference seen for each family and axis: ``make models``.

The tests of families record what they measure (``record_property(MEASURED, [family, axes, difference])``),
and ``pytest --measured FILE`` writes it. The page itself keeps what earlier runs measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from trilith.cli.shared.shown_model import AXES, features_of
from trilith.models import FAMILIES, published_sizes
from trilith.parallel_state import Layout
from trilith.storage.small_files import read_json, read_text

#: The name of the property that a test records.
MEASURED = "measured"
COLUMNS = ("transformers", *AXES, "ZeRO", "LoRA", "generation", "compile")
NOT_MEASURED, REFUSED = "not measured", "-"
HEAD = """# Models

Look here for which models there are, and how far each is from transformers; `trilith models` lists sizes
and abilities.

{models}

## Measured

`make models` runs the tests of every family and writes this page; `make models FAMILY=llama` measures one
family. A number is the largest relative difference that a test has seen, over losses, gradient norms, every
gradient and every weight of a tiny model of the family.

- **transformers**: outputs and gradients in layouts, against transformers on one device, in fp32.
- **tensor, sequence, pipeline, context, expert, ZeRO, compile**: two training steps in every tested layout
  that uses this axis, against one device, in fp64.
- **LoRA**: logits with adapters, against PEFT, in fp32.
- **generation**: how many of 128 greedy tokens differ from those of transformers.
- `-`: the family refuses it. `not measured`: nobody has run these tests for the family yet.

Every family predicts the next token. Encoders and their masked-language-model loss are not built; BERT and
its kin are [computed by transformers' code](any_model.md) as decoders alone.

"""

Cells = dict[str, dict[str, str]]


def axes_of(layout: Layout) -> list[str]:
    """Return the columns to which a training run in this layout counts."""
    used = {
        "tensor": layout.tensor > 1,
        "sequence": layout.sequence,
        "pipeline": layout.pipeline > 1,
        "context": layout.context > 1,
        "expert": layout.expert > 1,
        "ZeRO": layout.zero > 0,
    }
    return [axis for axis, yes in used.items() if yes]


@cache
def refused(family: str) -> set[str]:
    """Return the columns that the family cannot have."""
    features = features_of(FAMILIES[family])
    found = set(AXES) - set(features.axes)
    for column, can in (("LoRA", features.lora), ("generation", features.generation)):
        found |= set() if can else {column}
    return found


def cells_of(page: str) -> Cells:
    """Return the cells of an earlier page, by family and column."""
    lines = page[max(0, page.find("| family | transformers")) :].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    if len(rows) < 2:
        return {}
    columns = [one.strip() for one in rows[0]]
    named = [dict(zip(columns, (one.strip() for one in row), strict=False)) for row in rows[2:]]
    return {row.pop("family").strip("`"): row for row in named}


def with_measured(cells: Cells, measured: Iterable[tuple[str, Sequence[str], float]]) -> Cells:
    """Return the cells with new measurements in place of older ones: the largest difference of each."""
    largest: dict[tuple[str, str], float] = {}
    for family, axes, difference in measured:
        for axis in axes:
            largest[family, axis] = max(difference, largest.get((family, axis), 0.0))
    found = {family: dict(row) for family, row in cells.items()}
    for (family, axis), difference in largest.items():
        shown = f"{difference:.0f}" if axis == "generation" else f"{difference:.0e}"
        found.setdefault(family, {})[axis] = "0" if difference == 0 else shown
    return found


def page(cells: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page, a row for each family of the zoo."""
    by_family: dict[str, list[str]] = {}
    for name, size in published_sizes().items():
        by_family.setdefault(size.family.model_type, []).append(f"`{name}`")
    sizes = ["| published models | family |", "|---|---|"]
    sizes += [f"| {', '.join(names)} | `{family}` |" for family, names in by_family.items()]
    lines = [f"| family | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for family in FAMILIES:
        without, known = refused(family), cells.get(family, {})
        measured = [NOT_MEASURED if known.get(one, REFUSED) == REFUSED else known[one] for one in COLUMNS]
        row = [REFUSED if one in without else cell for one, cell in zip(COLUMNS, measured, strict=True)]
        lines.append(f"| `{family}` | {' | '.join(row)} |")
    return HEAD.replace("{models}", "\n".join(sizes)) + "\n".join(lines) + "\n"


def write_page(file: Path, measured: Iterable[tuple[str, Sequence[str], float]]) -> None:
    """Bring the page up to date with these measurements."""
    known = cells_of(read_text(file)) if file.exists() else {}
    file.write_text(page(with_measured(known, measured)), encoding="utf-8")


if __name__ == "__main__":
    write_page(Path("docs/models.md"), read_json(Path(sys.argv[1]))[MEASURED] if len(sys.argv) > 1 else [])
