"""A small run as a user starts it, for the tests that kill it."""

import json
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
from support.configs import config
from support.forked_launch import launch_forked
from support.kills import Campaign, wait_for
from support.short_runs import write_recipe
from trilith.checkpoints import complete_checkpoints, read_source, verify
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens
from trilith.runs import launch
from trilith.system.process_end import end, leave
from trilith.testing import ExitCode, run_fresh

SECTIONS = {
    "model": {"config": config("tiny_llama", layers=2)},
    "layout": {"data": 2, "zero": 1},
    "checkpoint": {"every": 2, "keep": 2},
}


def beating_often():
    """Let a rank's status say soon at which step it stands: a new step is written with the second beat."""
    return mock.patch("trilith.runs.heartbeat._BEAT", 0.2)


def train_as_a_rank(arguments):
    """Run the command, and end as it does; after one that went well or was refused, more quickly.

    Then all of the end runs in the whole start of ``test_readme``.
    """
    with beating_often():
        code = run(["train", *arguments])
    if code in (0, 2):
        leave(code)
    end(code)


def run_beating_often(words):
    with beating_often():
        return run(words)


def launch_as_a_user(words, folder, patience):
    """Start the command's own launcher, which waits so long for ranks that hang after another has failed."""
    with mock.patch("trilith.runs.launch._HANGING_AFTER", patience):
        launch_forked(run_beating_often, words, folder)


@dataclass(frozen=True)
class Launched:
    """Hold a launcher that runs: its process id, and its end to come."""

    pid: int
    ended: Future[list[ExitCode]]

    def end(self):
        """Wait for its end; return its code and what it and its ranks wrote to standard error."""
        (code,) = self.ended.result()
        return code, code.output


class Run:
    """Hold a recipe of 2 ranks, and run its command."""

    def __init__(self, folder, steps):
        self.folder = folder
        self.out, self.recipe = folder / "run", folder / "recipe.toml"
        data = {"tokens": str(write_tokens(folder / "tokens")), "sequence_length": 16}
        data |= {"global_batch": 8, "micro_batch": 2}
        raw = {"out": str(self.out), "steps": steps, "log_every": 1, "data": data, **SECTIONS}
        write_recipe(self.recipe, raw)

    @contextmanager
    def launched(self, *overrides, fault="", timeout=60, patience=launch._HANGING_AFTER):
        """Run the command with its own launcher, process for process as a user does, but forked."""
        known = self.folder / "launcher-0"
        known.unlink(missing_ok=True)
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
            patch.setenv("TRILITH_FAULT", fault)
            start = launch_as_a_user, 1, ["train", str(self.recipe), *overrides], str(self.folder), patience
            ended = pool.submit(run_fresh, *start, process_group=False, timeout=timeout)
            wait_for(lambda: Campaign.noted(known), timeout, "the launcher started", ended=ended)
            yield Launched(Campaign.noted(known), ended)
            ended.result()

    def finish(self, *overrides, fault=""):
        """Run it so until it ends; return its code and what it wrote to standard error."""
        with self.launched(*overrides, fault=fault) as process:
            return process.end()

    def ranks(self, *overrides, fault="", world=2, quiet=True, timeout=60):
        """Run the command on ranks as torchrun would start them, forked with their imports done: 1 s."""
        arguments = [str(self.recipe), *(["--quiet"] if quiet else []), *overrides]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRILITH_FAULT", fault)
            return run_fresh(train_as_a_rank, world, arguments, process_group=False, timeout=timeout)

    def status(self, rank):
        return json.loads((self.out / "status" / f"rank{rank}.json").read_text())

    def pid(self, rank):
        """Return the process id of the rank."""
        return int(self.status(rank)["pid"])

    def is_at(self, step, *, rank):
        """Tell whether the rank has come to a step."""
        return (self.out / "status" / f"rank{rank}.json").exists() and self.status(rank)["step"] == step

    @property
    def steps_saved(self):
        """Return the steps of the complete checkpoints, after reading each byte of each."""
        folder = self.out / "checkpoints"
        found = complete_checkpoints(folder) if folder.exists() else []
        for path in found:
            manifest = read_source(path).manifest
            assert manifest is not None
            verify(path, manifest)
        return [int(path.name.removeprefix("step-")) for path in found]


@pytest.fixture(autouse=True)
def import_path(monkeypatch):
    """Take off ``sys.path`` again the folders of the user's own files."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens") / "tokens")


@pytest.fixture(scope="session")
def make_in():
    """Return what makes a run in a folder, for a fixture of a module."""
    return Run


@pytest.fixture
def make(tmp_path):
    return lambda steps: Run(tmp_path, steps)
