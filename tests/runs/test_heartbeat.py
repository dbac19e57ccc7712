"""What ranks leave on disk, who is blamed because of it, how the start ended, and whom a launcher ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict
from unittest import mock

import pytest
from trilith.cli.app import run
from trilith.parallel_state import BadInput
from trilith.runs import heartbeat, launch
from trilith.runs.events import Events, outcome
from trilith.runs.guard import blame, blame_together, watched
from trilith.runs.heartbeat import Heartbeat, RankStatus, first_failure, read_status, status_folder
from trilith.runs.requests import PREEMPTED
from trilith.runs.terminal import Terminal
from trilith.system.process_info import LAUNCHER, start_of

#: This process, as the status of a rank names it.
HERE = {"host": socket.gethostname(), "pid": os.getpid()}


def leave(folder, rank, *, age=0.0, **said):
    told = {"code": None, "phase": "step", "step": 3, "error": "", "pid": os.getpid()}
    told |= {"host": "elsewhere", "run": "now"}
    status = RankStatus(rank=rank, time=0.0, **(told | said))
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps(asdict(status)))
    os.utime(path, (time.time() - age,) * 2)


def judged(folder, *statuses):
    """Return who is blamed by rank 0, from what ranks left."""
    for rank, status in enumerate(statuses):
        leave(folder, rank, **status)
    return blame(folder, len(statuses), but=0, run="now", wait=0)


def test_a_silent_rank_is_told_by_the_clock_of_the_disk(tmp_path):
    """The asking host's clock may be minutes off: the rank's last beat is compared with our own last beat."""
    died = f"rank 2 died or hangs in step of step 3 (pid {os.getpid()} on elsewhere)"
    assert judged(tmp_path, {"age": 100}, {"age": 99}, {"age": 110}) == died


def test_a_process_that_is_gone_is_silent_at_once(tmp_path):
    assert "rank 1 died" in judged(tmp_path, {}, {"host": socket.gethostname(), "pid": 2**22 - 1})


class Clock:
    """Stand for time that passes only in sleep, and for ranks that beat meanwhile."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.now, self.began = folder, 0.0, time.time()
        monkeypatch.setattr("trilith.runs.guard.time.monotonic", lambda: self.now)
        monkeypatch.setattr("trilith.runs.guard.time.sleep", self.sleep)
        self.beating = {0}

    def sleep(self, seconds):
        self.now += seconds
        for rank in self.beating:
            os.utime(self.folder / f"rank{rank}.json", (self.began + self.now,) * 2)


def test_a_rank_that_died_on_another_host_is_waited_for_until_it_is_silent(tmp_path, monkeypatch):
    """Its last beat is new, and this host cannot see its process."""
    clock = Clock(tmp_path, monkeypatch)
    for rank, age in enumerate((0.0, 0.5, 0.5)):
        leave(tmp_path, rank, age=age)
    clock.beating = {0, 2}
    assert "rank 1 died or hangs" in blame(tmp_path, 3, but=0, run="now")
    assert heartbeat.SILENT_AFTER - 0.5 < clock.now < heartbeat.SILENT_AFTER + 0.5


def test_ranks_of_another_host_that_beat_once_more_are_waited_for_no_longer(tmp_path, monkeypatch):
    clock = Clock(tmp_path, monkeypatch)
    leave(tmp_path, 0)
    leave(tmp_path, 1, age=0.5)
    clock.beating = {0, 1}
    assert blame(tmp_path, 2, but=0, run="now", wait=1.5) == ""
    assert 1.5 <= clock.now < 1.8


STEP_IN_WORDS = asdict(RankStatus(1, None, "step", "three", "", 0.0, 1, "elsewhere", run="now"))


@pytest.mark.parametrize(
    "rubbish", [b"", b"{", b"\xff", b"[]", b'{"rank": 1}', json.dumps(STEP_IN_WORDS).encode()]
)
def test_files_that_make_no_sense_are_passed_over(tmp_path, rubbish):
    leave(tmp_path, 0)
    (tmp_path / "rank1.json").write_bytes(rubbish)
    assert [status.rank for status in read_status(tmp_path, run="now")] == [0]
    assert blame(tmp_path, 2, but=0, run="now", wait=0) == "rank 1 never started"


def test_an_earlier_run_is_not_blamed(tmp_path):
    """torchrun clears nothing: files of an earlier start's ranks stay until their successors are written."""
    before, now = {"run": "before", "code": 2, "error": "of yesterday"}, {"code": 4, "error": "of today"}
    assert (
        judged(tmp_path, {}, before, now) == "rank 1 never started; rank 2 failed in step of step 3: of today"
    )


def test_who_was_asked_to_stop_did_not_fail(tmp_path):
    assert judged(tmp_path, {}, {"code": PREEMPTED, "error": "asked to stop", "age": 5}) == ""
    first = first_failure(tmp_path, run="now")
    assert first is not None and first.rank == 1  # nothing else ended
    leave(tmp_path, 0, code=3, error="a collective failed", cause=False)
    first = first_failure(tmp_path, run="now")
    assert first is not None and first.rank == 0


def test_a_process_id_that_was_given_out_again_is_not_the_rank_s(tmp_path):
    started = start_of(os.getpid())
    assert judged(tmp_path, {}, {**HERE, "started": started}) == ""
    assert "rank 1 died" in judged(tmp_path, {}, {**HERE, "started": started - 1})


def test_nothing_is_written_before_the_folder_is_known_to_be_ours(tmp_path):
    with Heartbeat(tmp_path / "status", 0, 2) as beat:
        beat.at("step", 1)
        assert blame_together(beat) == ""
        beat.end(3, "failed early")
    assert not [*tmp_path.iterdir()]


def test_in_the_place_of_a_folder_that_was_moved_a_status_is_written_anew(tmp_path):
    with Heartbeat(tmp_path / "status", 0, 1) as beat:
        (tmp_path / "status").mkdir()
        beat.publish("now")
        (tmp_path / "status").rename(tmp_path / "moved")
        beat.end(0)
        assert [status.code for status in read_status(tmp_path / "status", run="now")] == [0]


def test_a_rank_that_ends_slowly_does_not_write_over_the_next_start_s_file(tmp_path):
    with Heartbeat(tmp_path, 1, 2) as slow, Heartbeat(tmp_path, 1, 2) as new:
        slow.publish("before")
        new.publish("now")
        slow.at("save", 7)
        slow.end(3, "of yesterday")
        (found,) = read_status(tmp_path, run="now")
        assert (found.code, found.phase) == (None, "start")
        assert read_status(tmp_path, run="before") == []


def test_a_beat_makes_no_file_and_reads_none(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "_BEAT", 0.02)
    reads, read, path = [], heartbeat.read_json, tmp_path / "rank0.json"
    monkeypatch.setattr(heartbeat, "read_json", lambda path: reads.append(path) or read(path))
    with Heartbeat(tmp_path, 0, 1) as beat:
        beat.publish("now")
        for step in range(3):
            beat.at("start", step)
            os.utime(path, (0, 0))
            made, deadline = path.stat().st_ino, time.monotonic() + 10
            while not path.stat().st_mtime and time.monotonic() < deadline:
                time.sleep(0.01)
            assert path.stat().st_mtime > 1 and path.stat().st_ino == made
    assert len(reads) == 1  # before the last word, which is written


def test_a_step_that_lasts_is_told_and_others_are_not_each(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "_BEAT", 0.05)
    with Heartbeat(tmp_path, 0, 1) as beat:
        beat.publish("now")
        beat.at("step", 1)
        made, deadline = {(tmp_path / "rank0.json").stat().st_ino}, time.monotonic() + 0.5
        for step in range(2, 10**9):
            beat.at("step", step)
            made.add((tmp_path / "rank0.json").stat().st_ino)
            if time.monotonic() > deadline:
                break
        assert len(made) <= 3  # of thousands; one, if this process always runs
        while read_status(tmp_path, run="now")[0].step != step and time.monotonic() < deadline + 10:
            time.sleep(0.01)
        assert read_status(tmp_path, run="now")[0].step == step


def test_a_beat_after_a_later_start_is_none_of_its(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "_BEAT", 0.02)
    with Heartbeat(tmp_path, 0, 1) as slow:
        slow.publish("before")
        leave(tmp_path, 0, age=100)
        (tmp_path / "rank0.json").rename(tmp_path / "kept")
        leave(tmp_path, 0, age=100)  # a file that the next start made
        time.sleep(0.2)
        assert time.time() - (tmp_path / "rank0.json").stat().st_mtime > 90


def test_a_failure_is_looked_for_by_one_rank_and_not_by_each(tmp_path, monkeypatch):
    world, reads, read = 24, [], heartbeat.read_json

    def counted(path):
        reads.append(path)
        return read(path)

    monkeypatch.setattr("trilith.runs.guard._WAIT", 0.0)
    with ExitStack() as stack:
        beats = [stack.enter_context(Heartbeat(tmp_path, rank, world)) for rank in range(world)]
        for beat in beats:
            beat.publish("now")
        beats[3].at("step", 7)
        beats[3].end(5, "out of luck")
        monkeypatch.setattr("trilith.runs.heartbeat.read_json", counted)
        monkeypatch.setattr("trilith.runs.guard.read_json", counted)
        accused = [blame_together(beat) for beat in beats if beat is not beats[3]]
        assert accused == ["rank 3 failed in step of step 7: out of luck"] * (world - 1)
        assert len(reads) < 4 * world
        assert blame_together(beats[3]) == ""  # nobody else did
    heartbeat.clear_status(tmp_path)
    assert not [*tmp_path.iterdir()]


def ended(out, *codes, start="a", cause=0, ago=0):
    """Write the status of ranks of one start, as they leave it; ``cause``: the rank that failed by itself."""
    folder = status_folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    for rank, code in enumerate(codes):
        told = {"code": code, "step": 7, "error": f"of {rank}", "pid": 1, "cause": rank == cause}
        leave(folder, rank, age=ago, run=start, **told)


@pytest.mark.parametrize(
    ("codes", "code", "text"),
    [
        ([0, 0], 0, "finished after step 7"),
        ([75, 75], 75, "stopped and saved after step 7; the same command goes on"),
        ([2, 2], 2, "rank 0 failed with code 2: of 0"),
        ([3, 3], 3, "rank 0 failed with code 3: of 0"),
        ([4, 3], 4, "rank 0 failed with code 4: of 0"),
        ([75, 3], 3, "rank 1 failed with code 3: of 1"),
        ([0, None], None, "1 of 2 ranks run; step 7"),
    ],
)
def test_the_code_is_that_of_the_rank_that_failed_by_itself(codes, code, text, tmp_path):
    ended(tmp_path, *codes)
    found = outcome(tmp_path)
    assert (found.code, found.text) == (code, text)


@pytest.mark.parametrize(
    ("code", "events", "before"),
    [
        (2, ["started", "finished"], "; before that start the run finished after step 60"),
        (2, ["started", "stopped"], "; before that start the run stopped and saved after step 60"),
        (2, ["finished", "resumed", "failed"], ""),  # it began to train
        (3, ["finished"], ""),
    ],
)
def test_a_refused_start_does_not_hide_how_the_run_ended(code, events, before, tmp_path):
    ended(tmp_path, code)
    facts = {"goal": 60, "world": 1, "layout": "", "checkpoint": "", "written_by": ""}
    for event in events:
        Events(tmp_path / "events.jsonl").note(event, 60, **facts)
    last = outcome(tmp_path)
    assert (last.code, last.text) == (code, f"rank 0 failed with code {code}: of 0{before}")
    ended(tmp_path, 0)
    Events(tmp_path / "events.jsonl").note("finished", 7, goal=60)
    assert outcome(tmp_path).text == "finished after step 7 of 60, as asked"


def test_a_rank_that_fell_silent_is_lost(tmp_path):
    ended(tmp_path, None, ago=60)
    found = outcome(tmp_path)
    assert (found.code, found.text) == (3, "rank 0 on elsewhere was lost in step of step 7")


def test_a_start_before_the_job_does_not_count(tmp_path):
    ended(tmp_path, 75, ago=60)
    mark = tmp_path / "job-started"
    mark.touch()
    with pytest.raises(BadInput, match=r"no rank that started since .*job-started was written"):
        outcome(tmp_path, since=mark)
    ended(tmp_path, 0, start="b", ago=-1)
    assert outcome(tmp_path, since=mark).code == 0


@pytest.mark.parametrize(("codes", "code"), [([0], 0), ([75], 75), ([3], 3), ([None], 1)])
def test_the_command_ends_with_the_run_s_code_if_asked(codes, code, tmp_path, capsys):
    ended(tmp_path, *codes)
    assert run(["status", str(tmp_path), "--exit-code"]) == code
    assert run(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == outcome(tmp_path).text


def ended_by_a_launcher(ranks, folder, *, seconds):
    """Let a launcher wait for ranks, so long for one that has said how it ends; return their exit codes."""
    try:
        with mock.patch.multiple(launch, _LOOK_EVERY=0.1, _HANGING_AFTER=0.2, _ENDING_AFTER=seconds):
            launch._wait(ranks, folder, "ours")
        return [rank.returncode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_after_a_failure_ranks_are_asked_to_end_and_those_that_hang_are_killed(tmp_path):
    """Rank 0 has failed, rank 1 ends when it is asked, rank 2 hangs, rank 3 is about to end; rank 4 says so
    and hangs.
    """
    deaf = "trap '' TERM; exec sleep"
    scripts = ("exit 2", "exec sleep 60", f"{deaf} 60", f"{deaf} 0.6", f"{deaf} 60")
    ranks = [subprocess.Popen(["sh", "-c", script]) for script in scripts]
    for ending in (3, 4):
        leave(tmp_path, ending, run="ours", code=3, pid=ranks[ending].pid)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        leave(tmp_path, 2, run="ours", pid=stranger.pid)  # whatever a status says, only our ranks are killed
        codes = ended_by_a_launcher(ranks, tmp_path, seconds=2.0)
        lives = stranger.poll() is None
        stranger.kill()
    assert codes == [2, -signal.SIGTERM, -signal.SIGKILL, 0, -signal.SIGKILL] and lives


def test_a_process_that_hangs_behind_the_good_end_of_all_ranks_is_killed(tmp_path):
    ranks = [subprocess.Popen(["sleep", seconds]) for seconds in ("60", "0.5")]
    for number, process in enumerate(ranks):
        leave(tmp_path, number, run="ours", code=0, pid=process.pid)
    watchdog = threading.Timer(20, ranks[0].terminate)
    watchdog.start()
    assert ended_by_a_launcher(ranks, tmp_path, seconds=1.0) == [-signal.SIGKILL, 0]
    watchdog.cancel()


def test_a_stop_before_the_ranks_have_begun_is_no_failure_of_theirs(tmp_path, capsys):
    def start(*arguments, **_):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return [subprocess.Popen(["sleep", "60"]) for _ in range(2)]

    with mock.patch.object(launch, "_start", start):
        assert launch.launch([], 2, tmp_path / "status") == PREEMPTED
    assert "stopped: asked to stop before the ranks had begun" in capsys.readouterr().err


@pytest.mark.parametrize(("gone", "code"), [(False, 0), (True, -signal.SIGTERM)])
def test_a_rank_whose_launcher_is_gone_before_it_looks_ends(gone, code):
    command = "from trilith.system.process_info import end_with_parent; end_with_parent()"
    environment = {**os.environ, LAUNCHER: "1" if gone else str(os.getpid())}
    assert subprocess.run([sys.executable, "-c", command], env=environment).returncode == code


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("a pipe", "Broken pipe. The reader of a pipe stopped."),
        ("/dev/full", "standard output: No space left"),
    ],
)
def test_an_output_that_takes_nothing_more_is_the_rank_s_failure(output, why, tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    file = writer if output == "a pipe" else os.open(output, os.O_WRONLY)
    with pytest.raises(OSError), os.fdopen(file, "w") as stream, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        with watched(tmp_path, 0, 1, run="now"):
            Terminal(steps=1, interval=1).say("device: cpu")
    status = first_failure(tmp_path, run="now")
    assert status.code == 3 and status.error.startswith(why)
