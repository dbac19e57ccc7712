"""Write inputs of commands: an adapter of PEFT's, and the metrics of a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trilith.runs.metrics import StepMetrics


def write_adapter(folder: Path, base: Path) -> None:
    """Write an adapter of rank 2 on each ``q_proj`` of a Hugging Face folder."""
    folder.mkdir()
    stated = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    adapters: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            site = "base_model.model." + name.removesuffix(".weight")
            adapters[f"{site}.lora_A.weight"] = torch.ones(2, weight.shape[1])
            adapters[f"{site}.lora_B.weight"] = torch.ones(weight.shape[0], 2)
    save_file(adapters, folder / "adapter_model.safetensors")


def write_line_of_metrics(run: Path) -> None:
    """Write the metrics of one step into a run's folder."""
    line = StepMetrics(0, 1.0, 1.0, 0.1, tokens=8, tokens_per_second=8.0, seconds=1.0)
    (run / "metrics.jsonl").write_text(json.dumps(asdict(line)) + "\n")
