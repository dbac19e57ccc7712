"""Tell who holds a rank's memory at the worst moment of its step, from the record of a simulated step."""

import re
from collections import Counter
from html import escape

from ...runs.report.html import table, whole_page
from ...simulation.record import StepRecord
from .pictures import memory_of_step

MARK = '<meta name="generator" content="trilith train --dry-run">'
KINDS_HEAD, HOLDERS_HEAD = ("kind", "GB", "share"), ("kind", "module", "made in", "by", "GB")
#: Modules that are listed: the largest holders.
_MOST = 12


def kinds_of_bytes(record: StepRecord) -> list[tuple[str, str, str]]:
    """Return the bytes at the worst moment by kind, the largest first: kind, GB, share."""
    return [
        (kind, f"{size / 1e9:,.2f}", f"{size / record.peak:.1%}")
        for kind, size in record.kinds.items()
        if size >= record.peak / 1000
    ]


def largest_holders(record: StepRecord) -> list[tuple[str, ...]]:
    """Return the largest holders at the worst moment. Blocks are counted together: ``layers.*``."""
    sizes = Counter[tuple[str, str, str, str]]()
    for holder in record.holders:
        module = re.sub(r"\.\d+(?=\.|$)", ".*", holder.module)
        sizes[holder.kind, module, holder.phase, holder.operator.removeprefix("aten::")] += holder.bytes
    return [(*key, f"{size / 1e9:,.2f}") for key, size in sizes.most_common(_MOST)]


def exact_line(record: StepRecord, planned: int) -> str:
    """Return the exact peak beside the planned one, in one line; ``planned``: bytes, without the runtime."""
    phase = max(record.timeline, key=lambda piece: piece[1])[0]
    return (
        f"{record.peak / 1e9:,.3f} GB of tensors at the worst moment, in the {phase}; the plan says "
        f"{planned / 1e9:,.3f} ({planned / record.peak - 1:+.2%})"
    )


def make_step_page(name: str, record: StepRecord, planned: int) -> str:
    """Return a page, HTML without scripts: a picture of the step's memory, and tables of who holds it."""
    body = [
        f"<h1>Memory of rank {record.rank} of {escape(name)}</h1>",
        f"<p>{escape(exact_line(record, planned))}.</p>",
        "<p>One step of the rank ran on a simulated device: the program, not compiled, with tensors that "
        f"have shapes and no numbers, and the kernels of a {record.kernels.upper()}. What is in no tensor "
        "(the runtime, communicators, workspaces of kernels) is not counted.</p>",
        f'<figure class="broad"><figcaption>Bytes alive during the step</figcaption>{memory_of_step(record)}'
        "</figure>",
        "<h2>At the worst moment, by kind</h2>",
        table(kinds_of_bytes(record), head=KINDS_HEAD, text=1),
        "<h2>The largest holders</h2>",
        "<p>Blocks are counted together (*).</p>",
        table(largest_holders(record), head=HOLDERS_HEAD, text=4),
    ]
    return whole_page(f"memory of {name}", "".join(body), mark=MARK)
