"""Run commands as a user types them, in a folder, for rows that refuse."""

from __future__ import annotations

import contextlib
from pathlib import Path

from trilith.cli.app import make_app
from typer.testing import CliRunner


def call_command(folder: Path, *words: str) -> None:
    """Run a command of ``trilith`` in this folder, and let through what it raises."""
    with contextlib.chdir(folder):
        CliRunner().invoke(make_app(), words, catch_exceptions=False)
