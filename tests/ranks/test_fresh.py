"""run_fresh: ranks of their own, whose exit codes and last words come back, and none outlives its parent."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.kills import wait_for
from trilith.parallel_state import BadCheckpoint
from trilith.ranks import processes
from trilith.ranks.worker import wait_for_all
from trilith.system.process_end import leave
from trilith.system.process_info import process_info
from trilith.testing import RankError, run_fresh, run_parallel


def end_each_in_its_way():
    match dist.get_rank():
        case 0:
            atexit.register(print, "at the very end")
        case 1:
            raise BadCheckpoint("step-10", expected="a manifest")
        case 2:
            raise KeyError("what")
        case 3:
            sys.exit(75)
        case 4:
            sys.exit("a word")
        case 5:
            os._exit(9)
        case 6:
            os.kill(os.getpid(), signal.SIGKILL)
        case 7:
            print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
            print(all(signal.getsignal(one) is signal.SIG_DFL for one in (signal.SIGTERM, signal.SIGCHLD)))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        case 8:
            atexit.register(print, "an exit function")
            threading.Thread(target=lambda: time.sleep(0.2) or print("a thread")).start()
            leave(5)


def start_another():
    """Start a process that a rank leaves to itself, such as a compiler; return its number."""
    return subprocess.Popen(["sleep", "1000"]).pid


def wait_in_vain():
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        print("started", start_another())
        time.sleep(1000)
    try:
        dist.barrier()
    except RuntimeError as error:
        print("gave up:", error)
        sys.exit(3)


def report_process():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TRILITH_PROBE")
    print(os.getpid(), os.getcwd(), *(os.environ.get(name) for name in names))
    print(threading.current_thread() is threading.main_thread(), torch.get_num_threads())
    print(dist.get_debug_level(), "trilith.cli.app" in sys.modules)


def test_no_rank_goes_on_before_all_have_joined():
    store, gone = dist.HashStore(), []
    limit = timedelta(seconds=20)
    first = threading.Thread(target=lambda: (wait_for_all(store, 0, 2, limit), gone.append(0)))
    first.start()
    first.join(0.3)
    assert not gone
    wait_for_all(store, 1, 2, limit)
    first.join(20)
    assert gone == [0]


def test_every_way_to_end_has_its_exit_code_and_last_words():
    codes = run_fresh(end_each_in_its_way, 9)
    assert codes == [0, 4, 1, 75, 1, 9, -signal.SIGKILL, -signal.SIGTERM, 5]
    assert codes[0].output == "at the very end\n", "the interpreter ends as a script's does"
    assert "BadCheckpoint: step-10: expected a manifest" in codes[1].output
    assert "Traceback" in codes[2].output and "in end_each_in_its_way" in codes[2].output
    assert "a word" in codes[4].output
    assert codes[7].output == "True\nTrue\n", "signals have their ordinary handlers"
    assert codes[8].output == "a thread\nan exit function\n", "a rank that leaves early waits for both"


def test_ranks_that_do_not_end_are_named_shown_and_killed():
    with pytest.raises(RankError, match="rank 0 did not end within 3 s") as caught:
        run_fresh(wait_in_vain, 2, timeout=3, process_group=False)
    died, waited = caught.value.failures
    assert (died.rank, died.summary, waited.rank) == (1, "died with exit code 3", 0)
    assert "gave up" in died.output
    output = waited.output
    assert "wait_in_vain" in output
    wait_for(lambda: not running([int(output.split("started ")[1].split()[0])]), seconds=10)


def test_processes_are_new_each_time_with_this_process_s_environment_and_folder(tmp_path, monkeypatch):
    assert "trilith.cli.app" in processes.templates.preload
    monkeypatch.setenv("TRILITH_PROBE", "here")
    monkeypatch.chdir(tmp_path)
    pids = set()
    for level in ("DETAIL", "OFF"):
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
        for rank, code in enumerate(run_fresh(report_process, 2)):
            pid, *words = code.output.split()
            pids.add(pid)
            environment = [str(tmp_path), str(rank), str(rank), "2", "here"]
            assert words == [*environment, "True", "1", f"DebugLevel.{level}", "True"]
    assert len(pids) == 4


SCRIPT = """
import os
from trilith.ranks import run_parallel

class Pids(tuple):
    pass

def pids(kind, none):
    assert none == Pids()
    return kind((os.getppid(), os.getpid()))

if __name__ == "__main__":
    (found,) = run_parallel(pids, 1, Pids, Pids())
    assert type(found) is Pids
    print(*found, flush=True)
"""


def running(pids):
    return [pid for pid in pids if (info := process_info(pid)) is not None and info.state != "Z"]


def announce_and_hang(place, parent):
    Path(f"{place}.new").write_text(f"{parent} {os.getppid()} {os.getpid()} {start_another()}")
    Path(f"{place}.new").rename(place)
    time.sleep(1000)


def call_for_ever(place):
    processes._imported = list  # the template need not have what this process has imported
    run_parallel(announce_and_hang, 1, place, os.getpid())


def test_a_script_sends_its_own_classes_and_leaves_no_process_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2 and not running(pids)


def test_workers_end_with_a_killed_parent_even_in_the_middle_of_a_call(tmp_path):
    place = tmp_path / "pids"
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run_fresh, call_for_ever, 1, str(place), process_group=False)
        wait_for(place.exists)
        parent, *pids = map(int, place.read_text().split())
        assert running(pids) == pids and len(pids) == 3
        os.kill(parent, signal.SIGKILL)
        assert ended.result() == [-signal.SIGKILL]
    wait_for(lambda: not running(pids), seconds=10)
