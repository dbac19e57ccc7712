"""A small run as a user starts it, for the tests that kill it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from trilith.checkpoints import complete_checkpoints, read_source, verify
from trilith.cli.app import run
from trilith.testing import ExitCode, run_fresh
from trilith.testing.short_runs import write_tokens
from trilith.testing.tiny_models import TINY_LLAMA

RECIPE = """
out = "{out}"
steps = {steps}
log_every = 1
[model]
config = {config}
[layout]
data = 2
zero = 1
[data]
tokens = "{tokens}"
sequence_length = 16
global_batch = 8
micro_batch = 2
[checkpoint]
every = 2
keep = 2
"""


def train_as_a_rank(arguments: list[str]) -> None:
    sys.exit(run(["train", *arguments]))


class Run:
    """Hold a recipe of 2 ranks, and run its command."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.out, self.recipe = folder / "run", folder / "recipe.toml"
        config = "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in TINY_LLAMA.items()) + "}"
        tokens = write_tokens(folder / "tokens")
        self.recipe.write_text(RECIPE.format(out=self.out, steps=steps, config=config, tokens=tokens))

    def start(self, *overrides: str, fault: str = "") -> subprocess.Popen[str]:
        """Run the command with its own launcher, as a user does: some 10 s of imports."""
        command = [sys.executable, "-m", "trilith.cli", "train", str(self.recipe), *overrides]
        environment = {**os.environ, "TRILITH_FAULT": fault, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def finish(self, *overrides: str, fault: str = "", timeout: float = 120) -> tuple[int, str]:
        process = self.start(*overrides, fault=fault)
        _, errors = process.communicate(timeout=timeout)
        return process.returncode, errors

    def ranks(
        self, *overrides: str, fault: str = "", world: int = 2, quiet: bool = True, timeout: float = 60
    ) -> list[ExitCode]:
        """Run the command on ranks as torchrun would start them, forked with their imports done: 1 s."""
        arguments = [str(self.recipe), *(["--quiet"] if quiet else []), *overrides]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRILITH_FAULT", fault)
            return run_fresh(train_as_a_rank, world, arguments, process_group=False, timeout=timeout)

    def status(self, rank: int) -> dict[str, object]:
        found: dict[str, object] = json.loads((self.out / "status" / f"rank{rank}.json").read_text())
        return found

    @property
    def steps_saved(self) -> list[int]:
        """Return the steps of the complete checkpoints, after reading each byte of each."""
        folder = self.out / "checkpoints"
        found = complete_checkpoints(folder) if folder.exists() else []
        for path in found:
            manifest = read_source(path).manifest
            assert manifest is not None
            verify(path, manifest)
        return [int(path.name.removeprefix("step-")) for path in found]


@pytest.fixture
def make(tmp_path: Path) -> Callable[[int], Run]:
    return lambda steps: Run(tmp_path, steps)
