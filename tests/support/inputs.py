"""Write inputs of commands: an adapter of PEFT's, a run's metrics, a manifest that says something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from trilith.checkpoints import Saver, contents_of
from trilith.checkpoints.manifest import seal
from trilith.parallel_state import ParallelState
from trilith.runs.metrics import StepMetrics
from trilith.storage.file_names import MANIFEST


def write_adapter(folder: Path, base: Path, value: float = 1.0) -> None:
    """Write an adapter of rank 2, all numbers ``value``, on each ``q_proj`` of a Hugging Face folder."""
    folder.mkdir()
    stated = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    adapters: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            site = "base_model.model." + name.removesuffix(".weight")
            adapters[f"{site}.lora_A.weight"] = torch.full((2, weight.shape[1]), value)
            adapters[f"{site}.lora_B.weight"] = torch.full((weight.shape[0], 2), value)
    save_file(adapters, folder / "adapter_model.safetensors")


def write_line_of_metrics(run: Path) -> None:
    """Write the metrics of one step into a run's folder."""
    line = StepMetrics(0, 1.0, 1.0, 0.1, tokens=8, tokens_per_second=8.0, seconds=1.0)
    (run / "metrics.jsonl").write_text(json.dumps(asdict(line)) + "\n")


def saver_of(root: Path, model: nn.Module, **options: Any) -> Saver:
    """Return what saves a module of one rank, without an optimizer, into the folder of a run."""
    state = ParallelState.alone()
    return Saver(root, model, None, contents_of(model, None, state=state), state=state, **options)


def change_manifest(folder: Path, change: Callable[[Any], object], *, sealed: bool = True) -> None:
    """Change what the manifest of a checkpoint says, as somebody would who also knows the seal."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.pop("seal")
    change(manifest)
    text = (json.dumps(manifest)[:-1] + "\n}\n").encode()
    (folder / MANIFEST).write_bytes(seal(text) if sealed else text)
