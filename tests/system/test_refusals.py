"""Check that a refusal by the system is one sentence with what to do, and the documented exit code."""

import errno
import os
import subprocess
import sys

import pytest
from trilith.cli.app import explain
from trilith.parallel_state import BadInput
from trilith.system import refusal_of

CASES = [
    (errno.ENOENT, 2),
    (errno.EACCES, 2),
    (errno.EPERM, 2),
    (errno.EROFS, 2),
    (errno.EISDIR, 2),
    (errno.ENOTDIR, 2),
    (errno.EEXIST, 2),
    (errno.ENAMETOOLONG, 2),
    (errno.ELOOP, 2),
    (errno.ENXIO, 2),
    (errno.ENOSPC, 3),
    (errno.EDQUOT, 3),
    (errno.EFBIG, 3),
    (errno.EIO, 3),
    (errno.EMFILE, 3),
    (errno.ENFILE, 3),
    (errno.ENOMEM, 3),
    (errno.EAGAIN, 3),
    (errno.EPIPE, 3),
]


@pytest.mark.parametrize(("number", "code"), CASES, ids=lambda value: errno.errorcode.get(value, ""))
def test_each_refusal_has_its_code_its_place_and_what_to_do(number, code):
    found, said = explain(OSError(number, os.strerror(number), "/some/place"))
    assert found == code
    assert said.startswith("/some/place: ") and os.strerror(number) in said
    assert "unexpected" not in said and len(said.partition(os.strerror(number))[2]) > 20


def test_every_number_that_the_system_has_gets_a_documented_code():
    for number in errno.errorcode:
        found = refusal_of(OSError(number, os.strerror(number), "a"))
        assert found is not None and found.code in (2, 3) and found.todo


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
    code, said = explain(error)
    assert code == 3 and says in said


def test_bad_input_that_came_of_a_starved_machine_is_not_the_users_fault():
    def read():
        try:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "tokenizer.json")
        except OSError as error:
            raise BadInput("folder", expected="a tokenizer", found=str(error)) from error

    with pytest.raises(BadInput) as caught:
        read()
    code, said = explain(caught.value)
    assert code == 3 and "ulimit -n" in said


def test_a_lock_that_is_held_is_no_fault_of_the_machines():
    held = BadInput("run", expected="a folder that no other run is using", found="in use")
    held.__context__ = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    assert explain(held)[0] == 2
    held.__cause__ = held.__context__
    assert explain(held)[0] == 2


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("y"), RuntimeError("z"), BadInput("w")])
def test_other_errors_are_not_the_systems(error):
    assert refusal_of(error) is None


def test_refusals_are_told_without_torch():
    """The room must load where torch cannot: too few descriptors, too little memory."""
    code = "import sys, trilith.cli.app; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_reader_that_stops_is_one_line_and_no_noise():
    code = (
        "import sys\nfrom trilith.cli.app import run\n"
        "def lines() -> None:\n    for n in range(100_000): sys.stdout.write(f'{n}\\n')\n"
        "def other() -> None: pass\n"
        "sys.exit(run(['lines'], (lines, other)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        said = child.stderr.read()
        assert child.wait(60) == 3
    assert said.startswith("error: Broken pipe. The reader of the output") and said.count("\n") == 1


def test_a_full_disk_behind_standard_output_is_one_line():
    code = (
        "import sys\nfrom trilith.cli.app import run\n"
        "def lines() -> None: sys.stdout.write('x\\n')\ndef other() -> None: pass\n"
        "sys.exit(run(['lines'], (lines, other)))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 3
    assert "No space left on device" in done.stderr and done.stderr.count("\n") == 1, done.stderr
