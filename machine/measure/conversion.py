"""Measure conversion between Hugging Face folders and sharded checkpoints against a copy of the bytes."""

import filecmp
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...checkpoints import convert
from ..random_files import write_hf_folder
from .row import Figures


def conversion_speed(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Write a folder of random bf16 weights; convert it to tensor 4 x pipeline 2 and back, and copy it.

    All of it lies in ``folder``, which must exist. The files are in the page cache when they are read.
    """
    source, copied = Path(folder, "hf"), Path(folder, "copied")
    cut, back = Path(folder, "cut"), Path(folder, "back")
    size = write_hf_folder(source, config, dtype="BF16")
    figures: Figures = {"weights: GB": size / 1e9}
    tensor = 4 if config["num_key_value_heads"] % 4 == 0 else 2
    work: dict[str, Callable[[], object]] = {
        "copy": lambda: shutil.copytree(source, copied),
        "to sharded": lambda: convert(source, cut, tensor=tensor, pipeline=2),
        "to Hugging Face": lambda: convert(cut, back),
    }
    for name, run in work.items():
        began = time.perf_counter()
        run()
        figures[f"{name}: GB/s"] = size / 1e9 / (time.perf_counter() - began)
    names = [path.name for path in source.glob("*.safetensors")]
    _, other, missing = filecmp.cmpfiles(source, back, names, shallow=False)
    note = f"tensor {tensor} x pipeline 2, checksums and fsync included; the copy has neither"
    if other or missing:
        return {"figures": figures, "status": "differs", "note": f"other bytes after the way back; {note}"}
    return {"figures": figures, "status": "passed", "note": f"same bytes after the way back; {note}"}
