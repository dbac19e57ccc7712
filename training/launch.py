"""From a command to a running process group: bare on one rank, through torchrun on many."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..parallel_state import BadInput, Layout, ParallelState

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def under_torchrun() -> bool:
    """Whether somebody has already started the ranks. Raises ``BadInput`` for half a set of its variables."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if name in os.environ]
    if given and len(given) < len(names):
        missing = ", ".join(sorted(set(names) - set(given)))
        raise BadInput(
            "environment",
            missing,
            expected=f"all of {', '.join(names)}",
            found=f"only {', '.join(given)}",
            todo="Start through torchrun, or unset them",
        )
    return bool(given)


@contextmanager
def process_group(
    layout: Layout, *, device: str = "cpu", timeout: timedelta = timedelta(minutes=10)
) -> Iterator[ParallelState]:
    """Join (or, on one rank, make) the process group and take it down at the end; gives this rank's state."""
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("recipe", "device", expected="cpu: this machine has no CUDA device", found="cuda")
    many = under_torchrun()
    world = int(os.environ["WORLD_SIZE"]) if many else 1
    layout.check_world(world)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    store = None if many else dist.HashStore()
    dist.init_process_group(
        BACKENDS[device],
        store=store,
        rank=-1 if many else 0,
        world_size=-1 if many else 1,
        timeout=timeout,
    )
    try:
        yield ParallelState.start(layout, device=device)
    finally:
        dist.destroy_process_group()


def launch(arguments: Sequence[str], world: int, status: Path, *, threads: int | None = None) -> int:
    """Run ``trilith <arguments>`` on ``world`` local ranks through torchrun; the exit code of the first that
    failed.

    torchrun flattens every exit code to 1, so each rank also leaves ``status/rank<r>.json``
    (``write_status``).
    """
    status.mkdir(parents=True, exist_ok=True)
    for old in status.glob("rank*.json"):
        old.unlink()
    each = threads or max(1, (os.cpu_count() or 1) // world)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", str(os.getpid())]
    command += ["--no-python", sys.executable, "-m", "trilith.cli", *arguments]
    environment = {"OMP_NUM_THREADS": str(each), **os.environ, "TRILITH_STATUS": str(status)}
    with tempfile.TemporaryFile("w+") as log:
        # What torchrun itself says on a failure is a page that blames the victim; it is kept for the
        # unexpected case.
        code = subprocess.call(command, env=environment, stderr=log)
        if code == 0:
            return 0
        failed = first_failure(status)
        if failed is None:
            log.seek(0)
            sys.stderr.write(log.read())
            return code if code > 0 else 1
    sys.stderr.write(f"error: rank {failed['rank']}: {failed['error']}\n")
    return int(failed["code"])


def write_status(code: int, error: str) -> None:
    """Leave this rank's end where the launcher looks for it; does nothing without a launcher."""
    folder = os.environ.get("TRILITH_STATUS")
    if not folder:
        return
    rank = int(os.environ.get("RANK", 0))
    path = Path(folder) / f"rank{rank}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"rank": rank, "code": code, "error": error, "time": _now()}))
    temporary.replace(path)


def first_failure(status: Path) -> dict[str, Any] | None:
    """The earliest status with a code other than 0."""
    found = [json.loads(path.read_text()) for path in status.glob("rank*.json")]
    failed = [one for one in found if one["code"]]
    return min(failed, key=lambda one: float(one["time"])) if failed else None


def _now() -> float:
    import time

    return time.time()
