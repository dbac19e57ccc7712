"""Give what bash makes of a script's `torchrun`: its words."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path


def words_of_bash(script: Path, *arguments: str) -> list[str]:
    """Run the script in bash with a `torchrun` that prints its words; return them."""
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder) / "torchrun"
        stub.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
        stub.chmod(0o755)
        (Path(folder) / "pretrain_gpt.py").touch()
        return subprocess.run(
            ["bash", str(script), *arguments],
            cwd=folder,
            env={"PATH": f"{folder}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout.splitlines()
