"""Run the whole suite in several processes, lanes, each of which takes the next file of tests."""

from __future__ import annotations

import os
import sys

import pytest

#: A lane with the processes of its tests keeps one core busy; more get in each other's way. ``-n 0``: none.
LANES = max(2, os.cpu_count() or 1)
#: Options of somebody who looks for one failure, which lanes would hide or reorder.
_ONE_PROCESS = ("keyword", "lf", "failedfirst", "stepwise", "usepdb", "trace", "collectonly")


def use_lanes(config: pytest.Config) -> None:
    """Have pytest-xdist run the tests in lanes if all of them are to run and nothing else is asked for.

    A lane needs 15 s of processor time before its first test, so one file or folder is quicker without.
    """
    option = vars(config.option).get  # a plugin that is not loaded has no options
    if hasattr(config, "workerinput"):  # this process is a lane
        return
    if (
        config.args_source is config.ArgsSource.ARGS
        or any(map(option, _ONE_PROCESS))
        or option("capture") == "no"
    ):
        return
    if "numprocesses" not in vars(config.option):
        sys.stderr.write("pytest-xdist is not loaded: all tests run in one process\n")
    elif option("numprocesses") is None and option("dist") == "no":
        config.option.numprocesses = LANES
    if option("dist") == "no" and option("numprocesses"):
        config.option.dist, config.option.loadscopereorder = "loadfile", False


def starts_lanes(config: pytest.Config) -> bool:
    """Return whether this process has its tests run in lanes, and runs none itself."""
    return not hasattr(config, "workerinput") and vars(config.option).get("dist", "no") != "no"
