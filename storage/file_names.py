"""Names of files and folders by which a folder is known: a checkpoint, a run, a Hugging Face folder."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
#: The name of a checkpoint of a run, with its step.
STEP_NAME = re.compile(r"step-([0-9]+)")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
#: PEFT's names of the same, for adapters.
ADAPTER_MODEL, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
