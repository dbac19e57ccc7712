"""Check that a refusal by the system is one sentence with what to do, and the documented exit code."""

import errno
import os
import subprocess
import sys
from functools import partial

import pytest
from trilith.cli.errors import explain
from trilith.parallel_state import BadInput, require
from trilith.system import refusal_of
from trilith.system.text import literal
from trilith.system.user_errors import asked

INPUT, MACHINE = (
    ("ENOENT", "EACCES", "EPERM", "EROFS", "EISDIR", "ENOTDIR", "EEXIST", "ENAMETOOLONG", "ELOOP", "ENXIO"),
    ("ENOSPC", "EDQUOT", "EFBIG", "EIO", "EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "EPIPE"),
)


@pytest.mark.parametrize("name", [*INPUT, *MACHINE])
def test_each_refusal_has_its_code_its_place_and_what_to_do(name):
    number = getattr(errno, name)
    code, line = explain(OSError(number, os.strerror(number), "/some/place"))
    assert code == (2 if name in INPUT else 3)
    assert line.startswith("/some/place: ") and os.strerror(number) in line
    assert "unexpected" not in line and len(line.partition(os.strerror(number))[2]) > 20


def test_every_number_that_the_system_has_gets_a_documented_code():
    for number in errno.errorcode:
        refusal = refusal_of(OSError(number, os.strerror(number), "a"))
        assert refusal is not None and refusal.code in (2, 3) and refusal.todo


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "Cannot allocate memory"),
        (RuntimeError("can't start new thread"), "no further process or thread"),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "no further process or thread"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "allocate memory"),
        (ImportError("libx.so: failed to map segment from shared object"), "Cannot allocate memory"),
        (ImportError("libx.so: cannot open shared object file: Too many open files"), "Too many open files"),
        (Exception("Too many open files (os error 24)"), "Too many open files"),
        (OSError("error: [Errno 28] Failed to write"), "No space left"),
    ],
)
def test_what_libraries_say_without_a_number_is_known(error, says):
    code, line = explain(error)
    assert code == 3 and says in line


def test_bad_input_that_came_of_a_starved_machine_is_not_the_users_fault():
    error = BadInput("folder", expected="a tokenizer", found="nothing")
    error.__cause__ = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "tokenizer.json")
    code, line = explain(error)
    assert code == 3 and "ulimit -n" in line


def test_a_lock_that_is_held_is_no_fault_of_the_machines():
    held = BadInput("run", expected="a folder that no other run is using", found="in use")
    held.__context__ = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    assert explain(held)[0] == 2
    held.__cause__ = held.__context__
    assert explain(held)[0] == 2


def test_a_refusal_of_ours_without_a_line_of_the_users_code_stays():
    with pytest.raises(BadInput, match=r"^layout: tensor: expected 1$"):
        asked(partial(require, False, "layout", "tensor", 1), "model.module", "a model")


def test_of_a_value_of_many_levels_the_beginning_is_shown():
    value = []
    for _ in range(200):
        value = [value]
    assert literal(value) == "[" * 80


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("y"), RuntimeError("z"), BadInput("w")])
def test_other_errors_are_not_the_systems(error):
    assert refusal_of(error) is None


#: A program with a command that writes many lines.
LINES = """
import os, sys
from trilith.cli.app import run
def lines() -> None:
    for number in range(100_000): sys.stdout.write(f"{number}\\n")
def other() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"x")
def train() -> None: lines()
sys.exit(run(sys.argv[1:], (lines, other, train)))
"""


def run_into(output, lines, *words):
    """Run one of the program's commands; return the exit code and what standard error shows."""
    command = [sys.executable, "-c", LINES.replace("100_000", lines), *words]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("lines", ["1", "100_000"], ids=["at the end", "in the command"])
def test_a_full_disk_behind_standard_output_is_one_line(lines):
    with open("/dev/full", "w") as full:
        code, errors = run_into(full, lines, "lines")
    assert code == 3
    assert errors.startswith("error: standard output: No space left on device") and errors.count("\n") == 1, (
        errors
    )


@pytest.mark.parametrize(
    ("lines", "words"),
    [("1", ["lines"]), ("100_000", ["lines"]), ("1", ["train", "--help"])],
    ids=["at the end", "in the command", "the help of a command that works"],
)
def test_an_output_that_nobody_reads_any_more_is_no_error(lines, words):
    reader, writer = os.pipe()
    os.close(reader)
    assert run_into(writer, lines, *words) == (0, "")
    os.close(writer)


@pytest.mark.parametrize("output", [subprocess.PIPE, subprocess.DEVNULL], ids=["read", "the null device"])
def test_another_pipe_that_nobody_reads_is_an_error(output):
    code, errors = run_into(output, "1", "other")
    assert code == 3 and errors.startswith("error: Broken pipe") and errors.count("\n") == 1
