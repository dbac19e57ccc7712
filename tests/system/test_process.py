"""What this process does to itself: searches for garbage when told, quiet libraries, its own memory."""

import gc
import mmap
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from trilith.parallel_state.process_groups import own_device
from trilith.system import (
    OverLimit,
    bounded,
    machine,
    manual_gc,
    no_garbage_search,
    process_info,
    quiet_libraries,
    search_garbage_rarely,
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


def in_a_new_process(check):
    """Return a test that calls ``check(searches)`` in a new process, where few objects are searched.

    ``searches`` holds the generation of each search; Python searches after ten new objects.
    """

    def run():
        searches = []
        gc.set_threshold(10, 2, 10)
        gc.callbacks.append(lambda phase, info: phase == "start" and searches.append(info["generation"]))
        check(searches)

    def test():
        code = f"import runpy; runpy.run_path({__file__!r})[{check.__name__!r}].run()"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    test.run = run
    return test


def make_objects():
    return [[number] for number in range(1000)]


class Node:
    """Be garbage that only a search finds."""


def seen_by_a_search(objects):
    """Count the objects that are not hidden from a search."""
    seen = set(map(id, gc.get_objects()))
    return sum(id(one) in seen for one in objects)


@in_a_new_process
def test_nothing_else_searches_until_the_end(searches):
    make_objects()
    assert len(searches) > 5
    with manual_gc() as search:
        searches.clear()
        make_objects()
        assert searches == []
        node = Node()
        node.itself = node
        gone = weakref.ref(node)
        del node
        search(True)
        assert gone() is None, "garbage is freed, and not hidden"
        search(False)
        assert searches == [2, 0]
        make_objects()
        assert searches == [2, 0]
    make_objects()
    assert len(searches) > 5


@in_a_new_process
def test_the_first_search_hides_what_is_there_until_the_end_whatever_ends_it(searches):
    here = make_objects()
    for error in (None, ValueError()):
        try:
            with manual_gc() as search:
                search(False)
                assert gc.get_freeze_count() == 0 and seen_by_a_search(here) == 1000
                search(True)
                hidden = gc.get_freeze_count()
                assert hidden > 1000 and seen_by_a_search(here) == 0
                new = make_objects()
                search(True)
                # Not equal: an object that another thread drops is freed, hidden or not.
                assert gc.get_freeze_count() <= hidden
                assert (seen_by_a_search(here), seen_by_a_search(new)) == (0, 1000)
                if error is not None:
                    raise error
        except ValueError:
            pass
        assert gc.get_freeze_count() == 0 and gc.isenabled() and seen_by_a_search(here) == 1000


@in_a_new_process
def test_what_the_caller_has_hidden_stays_hidden(searches):
    gc.freeze()
    hidden = gc.get_freeze_count()
    with manual_gc() as search:
        search(True)
        assert gc.get_freeze_count() <= hidden
    assert hidden - 100 < gc.get_freeze_count() <= hidden


@in_a_new_process
def test_what_a_template_has_hidden_is_not_counted_and_stays_hidden(searches):
    search_garbage_rarely()
    hidden = gc.get_freeze_count()
    with pytest.MonkeyPatch.context() as patch, manual_gc() as search:
        patch.setattr(gc, "get_freeze_count", None)  # it walks over all that is hidden
        search(True)
    assert hidden - 100 < gc.get_freeze_count() <= hidden


@in_a_new_process
def test_a_caller_that_never_searches_has_it_so_afterwards(searches):
    gc.disable()
    try:
        with manual_gc() as search:
            search(True)
        assert not gc.isenabled()
    finally:
        gc.enable()


@in_a_new_process
def test_what_is_made_meanwhile_is_not_searched_and_can_be_hidden(searches):
    with no_garbage_search():
        before = len(searches)
        kept = make_objects()
        assert len(searches) == before and len(kept) == 1000
    hidden = gc.get_freeze_count()
    with no_garbage_search(hide=True):
        pass
    assert gc.isenabled() and gc.get_freeze_count() > hidden + 1000


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
