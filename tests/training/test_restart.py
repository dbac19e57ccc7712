"""torchrun starts the ranks again after one died: the run resumes by itself."""

import os
import signal
import subprocess
import sys
import time

import pytest
from trilith.runs.events import read_events
from trilith.runs.metrics import read_metrics


@pytest.mark.slow  # two starts of two ranks with all their imports
def test_a_run_that_torchrun_restarts_goes_on_from_its_last_checkpoint(make):
    """Rank 1 is killed from outside, once; nobody starts anything again but torchrun."""
    run = make(100)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.2", "--no-python", sys.executable, "-m"]
    command += ["trilith.cli", "train", str(run.recipe), "--quiet", "timeout=20", "checkpoint.every=10"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(read_metrics(run.out / "metrics.jsonl")) < 15:
        assert process.poll() is None and time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)
    killed = run.status(1)["pid"]
    os.kill(int(killed), signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-2000:]
    assert run.status(1)["pid"] != killed
    assert run.steps_saved[-1] == 100
    assert [line["step"] for line in read_metrics(run.out / "metrics.jsonl")] == [*range(100)]
    events = [(one["event"], one["step"]) for one in read_events(run.out / "events.jsonl")]
    assert events[0] == ("started", 0) and events[-1] == ("finished", 100)
    (resumed,) = (step for event, step in events if event == "resumed")
    assert resumed >= 10
