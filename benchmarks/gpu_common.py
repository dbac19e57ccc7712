"""Share what the rows of ``gpu.py`` need: a folder, a small config, commands, how a function answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

#: A folder in memory that goes with the row.
FOLDER = Path(os.environ.get("TRILITH_ROW_FOLDER", "/dev/shm"))
SMALL: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 256, "moe_intermediate_size": 128,
}  # fmt: skip


def command(device: str, words: list[str]) -> dict[str, Any]:
    """Run a trilith command; its output is printed."""
    subprocess.run([sys.executable, "-P", "-m", "trilith", *words], check=True, cwd=FOLDER)
    return {}


def resized(raw: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return a config with other values of the fields that it has."""
    return raw | {key: value for key, value in fields.items() if key in raw}


def answer(figures: dict[str, Any]) -> None:
    Path(sys.argv[3]).write_text(json.dumps(figures))
