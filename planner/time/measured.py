"""Make a machine from the measurements of ``trilith bench``, in place of the table and its assumptions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from ...layers import Checkpointing
from ...parallel_state import BadInput
from ...simulation.model_flops import peak_named
from ...storage.small_files import read_json
from ...system import literal
from .machines import Efficiency, Link, Machine

#: What bench calls a dtype.
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
#: What bench's figures call the kinds of collectives.
FIGURE_NAMES = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}

_PINNED = "host to device, pinned: GB/s"
#: No figure of a machine is larger, in its unit.
_LARGEST = 1e18


def machine_from_bench(path: str | Path, *, gpus_per_node: int | None = None) -> Machine:
    """Return the machine of a ``bench.json``. Raises ``BadInput`` for a file that lacks a figure.

    A rate is what one rank reached, so every efficiency is 1, and peaks are the products measured. Links
    between nodes are unknown, because bench looks at one machine: they count as those inside. If bench found
    one device only, there are no links, and a plan of several ranks is refused. On a CPU a rank is one of the
    ``ranks`` that shared its cores and its memory when bench measured.
    """
    report = read_json(Path(path))
    facts, names = _facts(report, path)
    speed, links = _figures(report, "speed"), _figures(report, "links")
    cuda = facts.get("device") == "cuda"

    def of(figures: Mapping[str, Any], name: str, **limits: Any) -> float:
        return _figure(figures, name, path, **limits)

    products, attention = (
        {dtype: of(speed, f"{kind}, {word}: TFLOP/s") * 1e12 for dtype, word in _DTYPES.items()}
        for kind in ("matmul", "attention")
    )
    ranks = of(facts, "gpus" if cuda else "ranks")
    rates = {
        kind: of(links, f"{word}: GB/s") * 1e9
        for kind, word in FIGURE_NAMES.items()
        if links.get(f"{word}: GB/s")
    }
    best = max(rates.values(), default=0.0)
    small = of(links, "all-reduce of 4 KiB: us", zero=True) / 1e6 if links else 0.0
    again: dict[Checkpointing, float] = {}
    # Alone an all-reduce of next to nothing is two messages, and an exchange is one.
    waits = {"collective in a block": small, "exchange around a ring": small / 2}
    in_block: dict[str, dict[Checkpointing, float]] = {name: {} for name in waits}
    for mode in () if cuda else get_args(Checkpointing):
        measured = "full" if mode == "every" else mode
        if mode != "none":
            again[mode] = of(speed, f"checkpointing {measured}, for an operator: us", zero=True) / 1e6
        for name, alone in waits.items() if links else ():
            whole = of(links, f"{name}, checkpointing {measured}: us", zero=True) / 1e6
            in_block[name][mode] = max(0.0, whole - alone)
    groups = {
        kind: Link("measured", rate=of(links, f"{word} of a block: GB/s") * 1e9,
                   latency=of(links, f"{word} of a tiny block: us", zero=True) / 1e6)
        for kind, word in (FIGURE_NAMES.items() if links and not cuda else ())
    }  # fmt: skip
    share = {kind: rate / best for kind, rate in rates.items()}
    link, main = Link("measured", best, small / 2), "bfloat16" if cuda else "float32"
    efficiency = Efficiency(
        products=1.0,
        attention=attention[main] / products[main],
        memory=1.0,
        launch=of(speed, "operator in a block: us") / 1e6,
        source=f"measured: {path}",
        links={"": min(share.values(), default=1.0), **share},
        again=again,
        collectives=in_block["collective in a block"],
        exchanges=in_block["exchange around a ring"],
        groups=groups,
    )
    name = names[0] if cuda and names else str(facts.get("processor", "CPU"))[:80]
    return Machine(
        name,
        memory=of(facts, "memory", least=2.0**20) / (1 if cuda else ranks),
        peaks=products | {"float16": products["bfloat16"]},
        bandwidth=of(speed, "copy: GB/s read and written") * 1e9,
        inside=link,
        between=link,
        gpus=gpus_per_node or int(ranks),
        watts=0.0,
        source=f"measured: {path}",
        efficiency=efficiency,
        asynchronous=cuda,
        host=of(speed, _PINNED) * 1e9 if speed.get(_PINNED) else 25e9,
        stated=peak_named(name) if cuda else None,
    )


def _facts(report: Any, path: str | Path) -> tuple[Mapping[str, Any], list[str]]:
    """Return what a report says of the machine, and the names of its devices."""
    facts: Any = report.get("machine", {}) if isinstance(report, dict) else None
    rows = report.get("rows") if isinstance(report, dict) else None
    names = facts.get("names") or [] if isinstance(facts, dict) else None
    right = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if not right or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadInput(path, expected="the bench.json of `trilith bench`", found="another file")
    return facts, names


def _figures(report: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """Return the figures of the last row of a part that was measured."""
    rows = [row for row in report["rows"] if row.get("part") == part and row.get("status") == "done"]
    figures: Any = rows[-1].get("figures") if rows else None
    return figures if isinstance(figures, dict) else {}


def _figure(
    figures: Mapping[str, Any], name: str, path: str | Path, *, zero: bool = False, least: float = 0.0
) -> float:
    value = figures.get(name)
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if not least <= number <= _LARGEST or (number == 0 and not zero):
        todo = "`trilith bench --only speed,links` of this version measures it"
        raise BadInput(path, name, expected="a measured figure", found=literal(value), todo=todo)
    return float(number)
