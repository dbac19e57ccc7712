"""Run what needs the simulated device in processes of their own: torch cannot forget the device again."""

import os
from unittest import mock

import pytest
from trilith.ranks.messages import FunctionName
from trilith.system.process_end import leave
from trilith.testing import run_fresh


def and_leave(function, args):
    function.load()(*args)
    leave(0)


@pytest.fixture(scope="session")
def alone():
    """``alone(function, *args)``: call it in a new process, where it must not raise."""

    def run(function, *args):
        (code,) = run_fresh(and_leave, 1, FunctionName.of(function), args, process_group=False, timeout=300)
        assert code == 0, code.output

    return run


@pytest.fixture(scope="module")
def worker():
    """Return a process that simulates steps of recipes, in whose memory numbers lie before it is used."""
    from trilith.planner.search import Worker

    with mock.patch.dict(os.environ, MALLOC_PERTURB_="165"):  # glibc's
        worker = Worker()
    yield worker
    worker.close()
