"""Write a small run and the script that submits it to the Slurm of a test, and follow it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilith.machine.random_files import write_tokens
from trilith.runs.heartbeat import status_folder

from support.kills import Campaign, wait_for
from support.short_runs import losses, tiny_recipe, train, write_recipe


@dataclass(frozen=True)
class Submitted:
    """Hold a recipe, and the script for it that ``trilith launch slurm`` wrote."""

    folder: Path
    raw: dict[str, Any]

    @classmethod
    def write(
        cls,
        command: Callable[[list[str]], int],
        folder: Path,
        *options: str,
        steps: int,
        ranks: int = 2,
        **changes: Any,
    ) -> Submitted:
        """Write both; ``options`` are those of ``trilith launch slurm``, ``changes`` the recipe's.

        ``command`` is ``trilith.cli.app.run``.
        """
        tokens = write_tokens(folder / "tokens", count=40_000)
        changes = {"layout": {"data": ranks}, "log_every": 1, "timeout": 20} | changes
        raw = tiny_recipe(folder / "run", tokens, steps=steps, **changes)
        write_recipe(folder / "recipe.toml", raw)
        words = ["--minutes", "10", "--warning", "2", "--out", str(folder / "job.sbatch"), *options]
        assert command(["launch", "slurm", str(folder / "recipe.toml"), *words]) == 0
        return cls(folder, raw)

    @property
    def out(self) -> Path:
        """Return the run's folder."""
        return self.folder / "run"

    def wait_for_steps(self, count: int, seconds: float = 200) -> None:
        """Wait until the run has noted so many steps."""
        wait_for(lambda: len(losses(self.out)) >= count, seconds, f"step {count}: see {self.folder}")

    def wait_until_it_stands(self, rank: int, seconds: float = 60) -> int:
        """Wait until the rank has stopped itself at its fault; return its process id."""
        status = status_folder(self.out) / f"rank{rank}.json"
        pid = int(json.loads(status.read_text())["pid"])
        wait_for(lambda: Campaign.stands(pid), seconds, f"rank {rank} stands still: see {self.folder}")
        return pid

    def uninterrupted(self) -> list[tuple[float, float]]:
        """Train the recipe here without a stop; return the curve."""
        train(self.raw | {"out": str(self.folder / "whole")})
        return losses(self.folder / "whole")
