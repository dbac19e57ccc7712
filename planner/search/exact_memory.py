"""Tell who holds a rank's memory at the worst moment of its step, from the record of a simulated step."""

import re
from collections import Counter
from html import escape

from ...runs.report.html import table, whole_page
from ...simulation.record import StepRecord
from ..device_memory import unit_of
from .pictures import memory_of_step

#: Modules that are listed: the largest holders.
_MOST = 12


#: The head of a table, and its rows.
Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]


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
