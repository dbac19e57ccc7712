"""Whom a launcher ends: the processes that it started itself, on their own word, and no others."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from socket import gethostname
from unittest import mock

import pytest
from trilith.runs.heartbeat import RankStatus
from trilith.runs.own_ranks import OwnRanks
from trilith.system.process_info import adopting_orphans, children_of, start_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def leave(folder, rank, *, run, code, pid, started):
    status = RankStatus(rank, code, "step", 3, "", 0.0, pid, gethostname(), run=run, started=started)
    (folder / f"rank{rank}.json").write_text(json.dumps(asdict(status)))


@pytest.fixture
def torchrun(request):
    """Stand in for torchrun with one rank under it, which ends by itself after 1.5 s or the parameter's.

    The stand-in then prints the code with which its rank ended.
    """
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "ours"}
    command = ["sh", "-c", f"sleep {getattr(request, 'param', 1.5)}; echo $?"]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    while not children_of(child.pid):
        time.sleep(0.01)
    yield child
    child.kill()
    child.communicate()


def rank_of(child):
    (rank,) = children_of(child.pid)
    return rank.pid, rank.started


@pytest.mark.parametrize(
    ("run", "off", "ended", "torchrun"),
    [("ours", 0, True, 100), ("another's", 0, False, 1.5), ("ours", 1, False, 1.5)],
    ids=["ours", "of-another-start", "of-another-process"],
    indirect=["torchrun"],
)
def test_only_a_rank_of_this_start_is_taken_for_hanging(tmp_path, torchrun, run, off, ended):
    """Rank 0 of a start has failed; the status of rank 1 names a process that runs under our torchrun."""
    pid, started = rank_of(torchrun)
    leave(tmp_path, 0, run=run, code=2, pid=os.getpid(), started=start_of(os.getpid()))
    leave(tmp_path, 1, run=run, code=None, pid=pid, started=started + off)
    with mock.patch("trilith.runs.own_ranks._HANGING_AFTER", 0.2):
        assert OwnRanks(torchrun, tmp_path, "ours").wait() == 0
    assert torchrun.stdout is not None
    assert (int(torchrun.stdout.read()) != 0) == ended


def test_a_process_that_somebody_else_started_is_left_alone(tmp_path, torchrun):
    """Its status says everything right, but our torchrun is not its parent."""
    stranger = subprocess.Popen(["sleep", "60"])
    leave(tmp_path, 0, run="ours", code=2, pid=os.getpid(), started=start_of(os.getpid()))
    leave(tmp_path, 1, run="ours", code=None, pid=stranger.pid, started=start_of(stranger.pid))
    try:
        with mock.patch("trilith.runs.own_ranks._HANGING_AFTER", 0.2):
            OwnRanks(torchrun, tmp_path, "ours").wait()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("torchrun", [100], indirect=True)
def test_ranks_of_a_torchrun_that_was_killed_are_asked_to_leave_and_waited_for(tmp_path, torchrun):
    pid, _ = rank_of(torchrun)
    with adopting_orphans():
        ranks = OwnRanks(torchrun, tmp_path, "ours")
        torchrun.kill()
        began = time.monotonic()
        assert ranks.wait() == -signal.SIGKILL
    assert time.monotonic() - began < 50, "the rank has not ended by itself"
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        pytest.fail("the rank still runs")
