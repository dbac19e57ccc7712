"""Run each test of the simulated device in a process of its own: torch cannot forget the device again."""

import pytest
from trilith.testing import run_fresh


@pytest.fixture(scope="session")
def alone():
    """``alone(function, *args)``: call it in a new process, where it must not raise."""

    def run(function, *args):
        (code,) = run_fresh(function, 1, *args, process_group=False, timeout=300)
        assert code == 0, code.output

    return run
