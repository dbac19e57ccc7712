"""Try and measure trilith on one GPU; write benchmarks/results/gpu.json and .md: python benchmarks/gpu.py.

Parts, in order: ``smoke`` runs short programs, many at once, and only asks whether they work; ``tests``
compares the GPU with the CPU; ``speed`` measures, one program at a time. Each program is a process of its
own, and results are written after each, so a run that is cut keeps what it has. Without a GPU use ``--device
cpu``, which rehearses all rows at tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: Characters of a failed program's output that are kept.
KEPT = 6000


@dataclass
class Result:
    """Hold what a row gave: ``figures`` by name, and of a failed one the end of its output."""

    part: str
    name: str
    status: str
    seconds: float
    figures: dict[str, Any]
    output: str = ""


class Results:
    """Keep the results and write both files after each; ``commit`` is of the tree that was measured."""

    def __init__(self, out: Path, facts: Mapping[str, Any]) -> None:
        self.out, self.facts, self.rows, self._lock = out, facts, list[Result](), threading.Lock()

    def add(self, result: Result) -> None:
        with self._lock:
            self.rows.append(result)
            print(f"{result.status:8} {result.seconds:6.1f} s  {result.part}: {result.name}", flush=True)
            if result.status == "failed":
                print("    " + "\n    ".join(result.output.splitlines()[-8:]), flush=True)
            self.out.parent.mkdir(parents=True, exist_ok=True)
            document = {"machine": self.facts, "rows": [asdict(row) for row in self.rows]}
            self.out.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")
            self.out.with_suffix(".md").write_text(self._page())

    def _page(self) -> str:
        lines = ["# On one GPU", "", *(f"{key}: {value}  " for key, value in self.facts.items()), ""]
        lines += ["| part | what | status | s | figures |", "|---|---|---|---|---|"]
        for row in self.rows:
            figures = "; ".join(f"{key} {_rounded(value)}" for key, value in row.figures.items())
            lines.append(f"| {row.part} | {row.name} | {row.status} | {row.seconds:.0f} | {figures} |")
        return "\n".join(lines) + "\n"


def _rounded(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run(
    part: str, name: str, work: str, options: Mapping[str, Any], seconds: float, results: Results
) -> None:
    """Run function ``work`` of ``gpu_rows`` in a process of its own, and add what it returned."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        answer = Path(folder, "answer.json")
        program = [sys.executable, HERE / "gpu_rows.py", work, json.dumps({**options}), answer]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "TRILITH_ROW_FOLDER": folder}
        with Path(folder, "output").open("w+") as output:
            child = subprocess.Popen(
                program, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                status = "failed" if child.wait(seconds) else "done"
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)
                child.wait()
                status = "no time"
            output.seek(0)
            text = "" if status == "done" else output.read()[-KEPT:]
        figures = json.loads(answer.read_text()) if answer.exists() else {}
    results.add(Result(part, name, status, time.monotonic() - began, figures, text))


def machine_facts(device: str) -> dict[str, Any]:
    """Return versions, the GPU as nvidia-smi names it, and the commit of the tree."""
    import torch
    import transformers
    from measure import commit
    from trilith.machine.facts import host

    facts: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), **host()}
    facts |= {"torch": torch.__version__, "transformers": transformers.__version__, "device": device}
    if device == "cuda":
        facts |= {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
        query = [
            "nvidia-smi",
            "--query-gpu=name,memory.total,driver_version,clocks.sm",
            "--format=csv,noheader",
        ]
        facts["GPU"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return facts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help="smoke, tests, speed, or words of rows' names; default: all")
    parser.add_argument("--minutes", type=float, default=25.0, help="start no further row after this time")
    parser.add_argument("--at-once", type=int, default=6, help="short programs that run at once")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(HERE))
    from gpu_rows import ROWS

    deadline = time.monotonic() + 60 * options.minutes
    results = Results(options.results / "gpu", machine_facts(options.device))
    wanted = options.parts or ["smoke", "tests", "speed"]
    chosen = [row for row in ROWS if any(word == row[0] or word in row[1] for word in wanted)]

    def take(row: tuple[str, str, str, dict[str, Any], float]) -> None:
        part, name, work, keys, seconds = row
        if (left := deadline - time.monotonic()) < 15:
            results.add(Result(part, name, "no time", 0.0, {}))
            return
        run(part, name, work, {"device": options.device} | keys, min(seconds, left), results)

    for alone in (False, True):
        with ThreadPoolExecutor(1 if alone else options.at_once) as pool:
            [*pool.map(take, [row for row in chosen if (row[0] == "speed") is alone])]


if __name__ == "__main__":
    main()
