"""No worker outlives the process that started it, however that ends."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trilith.testing import run_fresh, run_parallel

SCRIPT = """
import os
from trilith.testing import run_parallel

def pids():
    return os.getpid(), os.getppid()

if __name__ == "__main__":
    print(*(pid for pair in run_parallel(pids, 2) for pid in pair), flush=True)
"""


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _all_end(pids, seconds=10.0):
    deadline = time.monotonic() + seconds
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(_runs, pids))


def announce_and_hang(place, parent):
    Path(f"{place}.new").write_text(f"{parent} {os.getppid()} {os.getpid()}")
    Path(f"{place}.new").rename(place)
    time.sleep(1000)


def call_for_ever(place):
    run_parallel(announce_and_hang, 1, place, os.getpid())


def test_a_script_leaves_no_process_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 4 and not any(map(_runs, pids))


def test_workers_end_with_a_killed_parent_even_in_the_middle_of_a_call(tmp_path):
    place = tmp_path / "pids"
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run_fresh, call_for_ever, 1, str(place), process_group=False)
        deadline = time.monotonic() + 60
        while not place.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        parent, *pids = map(int, place.read_text().split())
        assert all(map(_runs, pids)) and len(pids) == 2
        os.kill(parent, signal.SIGKILL)
        assert ended.result() == [-signal.SIGKILL]
    assert _all_end(pids)
