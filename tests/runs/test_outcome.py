"""Tell from a run's folder how its last start ended; torchrun's own exit code does not say it."""

import json
import os
import time

import pytest
from trilith.cli.app import run
from trilith.parallel_state import BadInput
from trilith.runs.heartbeat import status_folder
from trilith.runs.outcome import outcome


def ended(out, *codes, start="a", cause=0, ago=0, **more):
    """Write the status of ranks of one start, as they leave it; ``cause``: the rank that failed by itself."""
    folder = status_folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    for rank, code in enumerate(codes):
        said = {"rank": rank, "code": code, "phase": "step", "step": 7, "error": f"of {rank}", "pid": 1}
        said |= {"time": 0.0, "host": "elsewhere", "cause": rank == cause, "run": start}
        path = folder / f"rank{rank}.json"
        path.write_text(json.dumps(said | more))
        os.utime(path, (time.time() - ago,) * 2)


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


def test_a_folder_without_a_run_and_a_mark_that_is_not_there_are_refused(tmp_path):
    assert run(["status", str(tmp_path)]) == 2
    ended(tmp_path, 0)
    assert run(["status", str(tmp_path), "--since", str(tmp_path / "none")]) == 2
