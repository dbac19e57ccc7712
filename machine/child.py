"""Run one measurement in processes of its own: whatever ends them, the caller gets a line that says so."""

import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..ranks import RankError, run_fresh
from ..ranks.messages import FunctionName
from ..runs.metrics import finite
from ..storage.small_files import read_json
from ..system import quiet_libraries, usable_cores, whole_number
from ..system.process_end import leave


@dataclass(frozen=True)
class Ran:
    """Hold what a measurement returned on rank 0, or why there is nothing, in one line and in full."""

    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    output: str = ""


def in_ranks(
    work: Callable[..., dict[str, Any]], world: int, options: Mapping[str, Any], *, seconds: float
) -> Ran:
    """Call ``work(**options)`` on ``world`` new processes, with torchrun's environment, and return rank 0's
    result, which JSON must be able to hold; a number that is not finite becomes ``None``.

    Each has ``OMP_NUM_THREADS`` threads, or if that is not set its share of the machine's cores. An
    exception, a signal, and ``seconds`` that have passed all become ``error``.
    """
    threads = whole_number(os.environ.get("OMP_NUM_THREADS", "")) or max(1, usable_cores() // world)
    with tempfile.TemporaryDirectory() as folder:
        try:
            with quiet_libraries():  # torch's own account of a failure; the ranks' output is kept apart
                task = (FunctionName.of(work), dict(options), folder, threads)
                codes = run_fresh(_work, world, *task, timeout=seconds, process_group=False)
        except RankError as error:
            return Ran(error=str(error).splitlines()[0], output=str(error))
        # What was killed comes first: the others often fail because of it.
        failed = [(code >= 0, rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            _, rank, code = min(failed)
            return Ran(error=f"rank {rank} {_reason(code, code.output)}", output=code.output)
        return Ran(read_json(Path(folder, "result.json")))


def _reason(code: int, output: str) -> str:
    if code < 0:
        hint = ", as the system does where memory runs out" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line[0].isalpha() and "Error" in line.partition(":")[0]]
    return (errors or lines or [f"ended with exit code {code}"])[-1].strip()


def _work(work: FunctionName, options: dict[str, Any], folder: str, threads: int) -> None:
    torch.set_num_threads(threads)
    result = work.load()(**options)
    if os.environ["RANK"] == "0":
        Path(folder, "result.json").write_text(json.dumps(finite(result), allow_nan=False), encoding="utf-8")
    leave(0)
