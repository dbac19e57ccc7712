"""Libraries are kept quiet: what they write past Python is dropped, and what Python writes is not."""

import os
import sys

import pytest
from trilith.system import quiet_libraries


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
