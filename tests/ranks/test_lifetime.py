"""No worker outlives the process that started it, however that ends."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trilith.ranks import processes, run_fresh, run_parallel
from trilith.system.process_info import process_info

SCRIPT = """
import os
from trilith.ranks import run_parallel

def pids():
    return os.getppid(), os.getpid()

if __name__ == "__main__":
    print(*run_parallel(pids, 1)[0], flush=True)
"""


def running(pids):
    return [pid for pid in pids if (info := process_info(pid)) is not None and info.state != "Z"]


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return done


def announce_and_hang(place, parent):
    Path(f"{place}.new").write_text(f"{parent} {os.getppid()} {os.getpid()}")
    Path(f"{place}.new").rename(place)
    time.sleep(1000)


def call_for_ever(place):
    processes._imported = list  # the template need not have what this process has imported
    run_parallel(announce_and_hang, 1, place, os.getpid())


def test_a_script_leaves_no_process_behind(tmp_path):
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
        assert wait_until(place.exists, 60)
        parent, *pids = map(int, place.read_text().split())
        assert running(pids) == pids and len(pids) == 2
        os.kill(parent, signal.SIGKILL)
        assert ended.result() == [-signal.SIGKILL]
    assert wait_until(lambda: not running(pids), 10)
