"""Make the measurements of a machine one after the other, each in processes of its own, within a time; write
their report as JSON, and as one HTML page: tables, no script, no other file, no network.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

import torch

from ...parallel_state import require
from ...runs.launch import NO_GPU, no_gpu
from ...runs.metrics import finite
from ...runs.report.html import folded, table, whole_page
from ...storage.disk import Disk
from ...system.machine import memory_available
from ..child import in_ranks
from ..doctor.checks import diagnose
from ..facts import Finding, gpus, host
from ..random_files import write_tokens
from .cases import CPU_RANKS, PARTS, Bench, Case, cases
from .timing import Figures

#: A measurement is not begun with less than this left, in seconds.
_LEAST = 5.0
#: Ids of the token file: several batches of the largest case.
_TOKENS = 4_000_000


#: done: measured. passed, differs: compared with a bound. failed: no result. left out: not tried.
Status = Literal["done", "passed", "differs", "failed", "left out"]


@dataclass(frozen=True)
class Row:
    """Hold a line of the report. ``note``: why, or how; ``output``: all that a failed measurement printed."""

    part: str
    what: str
    status: Status
    figures: Figures = field(default_factory=dict)
    note: str = ""
    seconds: float = 0.0
    output: str = ""


@dataclass
class Report:
    """Hold what was measured, where: the machine, the doctor's findings, the rows."""

    machine: dict[str, Any]
    doctor: list[Finding]
    rows: list[Row] = field(default_factory=list)


def measure(
    out: Path,
    *,
    device: str | None = None,
    only: Sequence[str] = (*PARTS,),
    minutes: float = 10.0,
    quick: bool = False,
    begin: Callable[[Sequence[Case]], None] = lambda cases: None,
    done: Callable[[Row], None] = lambda row: None,
) -> Report:
    """Measure this machine; ``out``, which must exist, is where the files of the measurements lie meanwhile.

    ``device``: cpu or cuda; by default the GPUs if there are any. ``only``: parts to run. ``begin`` is told
    the cases, ``done`` each row. Cases that would begin after ``minutes`` are left out, and so is what
    this machine cannot hold; a case that fails is a row.
    """
    check_parts(only)
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(dir=out, prefix="work-") as name:
        folder = Path(name).absolute()
        Disk().write_file(folder / "first", bytes(1 << 20))  # a full disk is told before anything is measured
        machine = machine_facts(device)
        report = Report(machine, diagnose([out]))
        room = shutil.disk_usage(folder).free
        bench = Bench(machine["device"], machine["gpus"], machine["memory"], room, folder, quick)
        (bench.folder / "conversion").mkdir()
        write_tokens(
            bench.tokens, count=20_000 if bench.device == "cpu" else _TOKENS, vocab_size=bench.vocabulary
        )
        chosen = [*cases(bench, only)]
        begin(chosen)
        for case in chosen:
            report.rows.append(_measured(case, deadline - time.monotonic(), minutes))
            done(report.rows[-1])
    return report


def check_parts(only: Iterable[str]) -> None:
    """Refuse the name of a part that does not exist."""
    for name in only:
        require(name in PARTS, "bench", "--only", f"parts among {', '.join(PARTS)}", name)


def machine_facts(device: str | None = None) -> dict[str, Any]:
    """Return this machine's devices, memory and versions. Raises ``BadInput`` for a device that is not here.

    GPUs are asked in a process of its own, which gives their memory back.
    """
    require(device in (None, "cpu", "cuda"), "bench", "--device", "cpu or cuda", device)
    gpu_facts = in_ranks(gpus, 1, {}, seconds=120.0).result
    names = gpu_facts.get("names", [])
    require(device != "cuda" or names, "bench", "--device", "a GPU that torch sees", no_gpu(), NO_GPU)
    device = device or ("cuda" if names else "cpu")
    names = names if device == "cuda" else []
    return {
        "device": device,
        "gpus": len(names),
        "ranks": len(names) or CPU_RANKS,
        "names": names,
        "memory": gpu_facts["free"] if names else memory_available() or 0,
        **host(),
        "cuda": torch.version.cuda or "",
        "nccl": gpu_facts.get("nccl", ""),
        "began": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _measured(case: Case, seconds_left: float, minutes: float) -> Row:
    if case.work is None:
        return Row(case.part, case.what, "left out", note=case.note)
    if seconds_left < _LEAST:
        note = f"the {minutes:g} minutes are over; --minutes gives more, --only {case.part} runs it alone"
        return Row(case.part, case.what, "left out", note=note)
    began = time.monotonic()
    ran = in_ranks(case.work, case.world, case.options, seconds=min(case.seconds, seconds_left))
    seconds = time.monotonic() - began
    if ran.error:
        note = "; ".join(text for text in (ran.error, case.note) if text)
        return Row(case.part, case.what, "failed", note=note, seconds=seconds, output=ran.output)
    note = "; ".join(text for text in (case.note, ran.result.get("note", "")) if text)
    status = ran.result.get("status", "done")
    return Row(case.part, case.what, status, ran.result["figures"], note, seconds)


def report_json(report: Report) -> str:
    """Return the report as JSON; a number that is not finite is null."""
    return json.dumps(finite(asdict(report)), indent=2, allow_nan=False) + "\n"


def make_page(report: Report) -> str:
    """Return the report as a page."""
    body = [
        "<h1>trilith bench</h1>",
        table([[key, _text(value)] for key, value in report.machine.items()], caption="Machine"),
    ]
    for part, title in PARTS.items():
        rows = [row for row in report.rows if row.part == part]
        if rows:
            body += [f"<h2>{escape(title)}</h2>", _part(rows)]
    findings = ([finding.level, finding.check, finding.found, finding.todo] for finding in report.doctor)
    body += ["<h2>Doctor</h2>", table(findings, head=("", "check", "found", "what to do"))]
    return whole_page("trilith bench", "".join(body), command="trilith bench")


def _part(rows: Sequence[Row]) -> str:
    """Write the table of a part, a measurement a column if there are few, and what failed ones printed."""
    keys = list(dict.fromkeys(key for row in rows for key in row.figures))
    lines = [["result", *(row.status for row in rows)]]
    lines += [[key, *(shown_figure(row.figures.get(key, "")) for row in rows)] for key in keys]
    lines += [["seconds to measure", *(f"{row.seconds:.1f}" for row in rows)]]
    lines += [["note", *(row.note for row in rows)]]
    printed = "".join(
        folded(f"{row.what}: what it printed", f"<pre>{escape(row.output)}</pre>")
        for row in rows
        if row.output
    )
    return table(lines, head=("", *(row.what for row in rows))) + printed


def shown_figure(value: float | str | None) -> str:
    """Return a figure as people read it: 4 digits, thousands set apart."""
    if value is None or isinstance(value, str):
        return "not finite" if value is None else value
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
