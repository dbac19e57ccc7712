"""Set up all tests: lanes; one thread, as ranks have; fixed hypothesis examples; no process left over.

``--quick`` leaves out functions that took long (see ``support/run_times.py``), and skips tests that start a
process. A process that outlives the session is an error.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
from trilith.system import search_less_often

search_less_often()  # all that is imported from here on stays
# Or each lane compiles hypothesis and every test, and each process that a test starts the package, anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

from hypothesis import settings
from support import draws, lanes, run_times
from trilith.system import search_garbage_rarely
from trilith.system.process_info import children_of, environment_of, process_info

if os.environ.get("TRILITH_TEST_DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or recipes that leave `device` open would train on a GPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of lanes, and of processes that tests start
#: What files of tests import that start the command on ranks; a fork that imports it is slower by a third.
PRELOAD = ["pytest", "trilith.cli.app", "trilith.pipeline.driver", "support.short_runs"]
BEGIN = time.monotonic()
settings.register_profile(draws.ALL, deadline=None, derandomize=True)
settings.register_profile("trilith", settings.get_profile(draws.ALL), max_examples=50)
settings.register_profile("quick", settings.get_profile(draws.ALL), max_examples=20)

#: Every process that a test starts inherits this variable, and is known by it after its parent has ended.
MARK = f"{os.getpid()}-{time.time_ns()}"
os.environ["TRILITH_TEST_SESSION"] = MARK


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out tests that take long or start processes")
    parser.addoption(
        "--seconds", action="store_true", help="write tests/seconds.txt: what --quick leaves out"
    )
    parser.addoption("--measured", help="JSON file for the differences that the tests of families measured")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config):
    lanes.use_lanes(config)


def pytest_configure(config):
    default = "trilith" if config.getoption("markexpr") == "not slow" else draws.ALL
    settings.load_profile("quick" if config.getoption("quick") else default)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    """Prepare for ranks, unless this process only starts lanes: it never imports torch."""
    if lanes.starts_lanes(session.config):
        return
    import torch
    from trilith.ranks import processes

    torch.set_num_threads(1)
    processes.templates.preload = PRELOAD


@pytest.fixture(autouse=True, scope="session")
def no_processes_if_quick(request):
    """With ``--quick``, skip a test where it asks for ranks, forks, or starts Python."""
    from trilith.ranks import processes

    start = subprocess.Popen.__init__

    def skip(*given, **named):
        # Only `make quick` gives the option; `make check` runs every one of these tests.
        pytest.skip("--quick: starts a process")

    def init(self, command, *given, **named):
        first = command if isinstance(command, str | os.PathLike) else next(iter(command))
        if Path(first).parent == Path(sys.executable).parent:
            self.returncode, self._child_created = 0, False  # what its ``__del__`` reads
            skip()
        start(self, command, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("quick"):
            patch.setattr(processes.Templates, "start", skip)
            patch.setattr(subprocess.Popen, "__init__", init)
            patch.setattr(os, "fork", skip)
        yield


def pytest_collection_modifyitems(config, items):
    """Put the files that take longest first, so that no lane ends long after the others."""
    if config.getoption("quick"):
        long = run_times.known()
        left_out = [item for item in items if run_times.function_of(item.nodeid) in long]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if run_times.function_of(item.nodeid) not in long]
    elif lanes.starts_lanes(config) or hasattr(config, "workerinput"):
        of_file = run_times.seconds_of_files()
        items.sort(key=lambda item: -of_file[run_times.file_of(item.nodeid)])


def pytest_collection_finish():
    """Let no later garbage collection walk what is here by now, and stays: 10,000 tests and all imports."""
    search_garbage_rarely()


#: Seconds of each test function in this session, in all lanes.
TOOK = Counter()
#: What tests that passed have measured, by the name of the property (see ``support.models_page``).
FOUND = defaultdict(list)


def pytest_runtest_logreport(report):
    """Collect how long a test took and what it has measured, in this process or in a lane."""
    TOOK[run_times.function_of(report.nodeid)] += report.duration
    if report.when == "call" and report.passed:
        for name, value in report.user_properties:
            FOUND[name].append(value)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail the session if a process that a test started still runs once the pool's ranks have been ended."""
    if (file := session.config.getoption("measured")) and not hasattr(session.config, "workeroutput"):
        Path(file).write_text(json.dumps(FOUND))
    if session.config.getoption("seconds") and not hasattr(session.config, "workeroutput"):
        run_times.SECONDS.write_text(run_times.table(TOOK))
    if not lanes.starts_lanes(session.config):
        from trilith.ranks import pool, processes

        pool._pool.close()
        processes.templates.close()
    # Python's own helpers of `multiprocessing`, which it would end only with this process.
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()
    deadline = time.monotonic() + 20
    while (left := _left_behind()) and time.monotonic() < deadline:
        time.sleep(0.05)
    LEFT.extend(_description(pid) for pid in left)
    if hasattr(session.config, "workeroutput"):  # a lane tells the session that started it
        session.config.workeroutput["left"] = LEFT
    if LEFT:
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


#: A line for each process that was left behind here or in a lane.
LEFT = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Take over from a lane of pytest-xdist what its tests left behind."""
    LEFT.extend(getattr(node, "workeroutput", {}).get("left", ()))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    for line in run_times.summary(TOOK, time.monotonic() - BEGIN):
        terminalreporter.write_line(line)
    for line in LEFT:
        terminalreporter.write_line(f"still running after the last test: {line}", red=True)


def _left_behind():
    mine = f"TRILITH_TEST_SESSION={MARK}"
    numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    marked = [pid for pid in numbers if pid != os.getpid() and mine in environment_of(pid)]
    forked = [child.pid for child in children_of(os.getpid()) if child.alive]
    alive = [pid for pid in {*marked, *forked} if (info := process_info(pid)) is not None and info.alive]
    return sorted(alive)


def _description(pid):
    """Describe a process by its command, and by the test that ran when it started, if that is known."""
    try:
        command = (Path("/proc") / str(pid) / "cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        command = "?"
    name = "PYTEST_CURRENT_TEST="
    test = "".join(line.removeprefix(name) for line in environment_of(pid) if line.startswith(name))
    return f"process {pid}, {process_info(pid)}, command {command[:200]!r}, started in {test or 'no test'}"
