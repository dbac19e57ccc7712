"""What this process does to itself: limits, quiet libraries, its own memory."""

import mmap
import os
import sys
from pathlib import Path

import pytest
import torch
from trilith.parallel_state.process_groups import own_device
from trilith.system import (
    OverLimit,
    bounded,
    machine,
    process_info,
    quiet_libraries,
    whole_number,
)
from trilith.system.freed_blocks import LARGE, return_large_blocks
from trilith.system.process_info import own_memory, start_of
from trilith.testing import run_fresh


@pytest.mark.parametrize("text", ["", "²", "٨", "1_0", "+1", "-1", "max", "9" * 19, "9" * 5000])
def test_what_writes_no_number_is_none_and_never_an_error(text, tmp_path, monkeypatch):
    assert whole_number(text) is None and whole_number("007") == 7
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(f"1 2 0:1 / / rw - ext4 a rw\n{text}\n1 2 0:1 / / rw - \n")
    for name in ("cpu.max", "memory.max", "memory.current", "memory.stat"):
        (tmp_path / name).write_text(f"{text} {text}\nfile {text}\n")
    (tmp_path / "meminfo").write_text(f"MemAvailable: {text}\nMemAvailable: 3 kB\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    assert machine.usable_cores() >= 1 and machine.memory_available() == 3 * 1024
    assert machine.file_system_of(tmp_path) == "ext4"
    for name, number in (("cpu.max", "1 1"), ("memory.max", "4000"), ("memory.current", "3000")):
        (tmp_path / name).write_text(f"{number}\n")
    (tmp_path / "memory.stat").write_text("anon 2000\nfile 500\nfile_dirty 400\n")  # files can be given up
    assert machine.usable_cores() == 1 and machine.memory_available() == 4000 - 3000 + 500


def test_a_limit_inside_a_limit_leaves_the_outer_one():
    def work(seconds):
        until = os.times().user + seconds
        while os.times().user < until:
            pass

    with bounded(seconds=0.2):
        with bounded(seconds=5):
            work(0.05)
        with pytest.raises(OverLimit, match=r"^0\.2 s"):
            work(1)
    with pytest.raises(OverLimit, match=r"^0\.2 s"), bounded(seconds=0.2), bounded(seconds=5):
        work(1)


def test_only_what_is_written_past_python_is_dropped(capfd):
    with pytest.raises(ValueError, match="reason"), quiet_libraries():
        os.write(2, b"frame #0\n")
        print("from Python", file=sys.stderr)
        raise ValueError("reason")
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "from Python\nafterwards\n"


def test_a_closed_standard_error_is_no_fault():
    pid = os.fork()
    if pid == 0:
        os.close(2)
        try:
            with quiet_libraries():
                os.write(1, b"")
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


MORE = 64 << 20


def test_memory_that_is_written_to_is_counted_as_our_own():
    before = own_memory()
    assert before is not None and 0 < before.resident <= before.virtual
    with mmap.mmap(-1, MORE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        promised = own_memory()
        held.write(b"x" * MORE)
        written = own_memory()
    assert promised is not None and written is not None
    assert promised.virtual - before.virtual >= MORE and promised.data - before.data >= MORE
    assert written.resident - promised.resident > MORE // 2


def test_a_system_without_proc_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(process_info, "_PROC", tmp_path)
    assert own_memory() is None and start_of(os.getpid()) == 0 and not process_info.has_process_info()


@pytest.mark.parametrize("text", ["", "1 2 3", "a b c d e f g"])
def test_numbers_that_cannot_be_read_are_none(tmp_path, monkeypatch, text):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "statm").write_text(text)
    monkeypatch.setattr(process_info, "_PROC", tmp_path)
    assert own_memory() is None


BLOCKS = 30


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def free_blocks_between_others(started):
    """Print whether freed blocks have gone back; blocks that stay lie behind each in the heap."""
    torch.ones(
        3 * LARGE, dtype=torch.uint8
    )  # from when this is freed, glibc by itself keeps smaller blocks in its heap
    if started:
        own_device("cpu")  # as every ``ParallelState.start``
    before = resident()
    blocks, others = [], []
    for _ in range(BLOCKS):
        blocks.append(torch.ones(LARGE, dtype=torch.uint8))
        others.append(torch.ones(LARGE // 8, dtype=torch.uint8))
    blocks.clear()
    left = resident() - before - sum(x.nbytes for x in others)
    print("gone" if left < BLOCKS * LARGE / 10 else f"left: {left:,} bytes", flush=True)


@pytest.mark.parametrize("started", [False, True])
def test_blocks_that_a_started_rank_frees_go_back_to_the_system(started):
    (code,) = run_fresh(free_blocks_between_others, 1, started, process_group=False)
    assert code == 0 and ("gone" in code.output) == started, code.output


def test_a_threshold_of_the_environment_stays(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=8388608")
    assert not return_large_blocks()
