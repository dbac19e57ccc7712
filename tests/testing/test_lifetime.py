"""No worker outlives the process that started it, however that ends."""

import signal
import subprocess
import sys
import time

SCRIPT = """
import os, sys, time
from trilith.testing import run_parallel

def pids():
    return os.getpid(), os.getppid()

def announce_and_hang():
    print(os.getpid(), file=open(sys.argv[1] + f"/{os.environ['RANK']}", "w"), flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    print(*(pid for pair in run_parallel(pids, 2) for pid in pair), flush=True)
    if len(sys.argv) > 1:
        run_parallel(announce_and_hang, 2)
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


def test_a_script_leaves_no_process_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 4 and not any(map(_runs, pids))


def test_workers_end_with_a_killed_parent_even_in_the_middle_of_a_call(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("sys.argv[1]", repr(str(tmp_path))))
    parent = subprocess.Popen([sys.executable, script, "hang"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("[01]"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(_runs, pids)) and len(pids) == 4
    parent.send_signal(signal.SIGKILL)
    parent.wait(30)
    parent.stdout.close()
    assert _all_end(pids)
