"""Read ``run_config.yaml``, in which Megatron-Bridge states a model, under the names of Megatron's arguments.

Source: ``megatron/bridge/training/utils/config_utils.py`` (the file) and ``models/gpt_provider.py`` with
``megatron/core/transformer/transformer_config.py`` (the fields of its section ``model``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ...parallel_state import BadInput
from ...storage.safe_open import contained
from ...storage.small_files import read_text
from ...storage.strict_json import shown

_FILE = "run_config.yaml"
_MOST_BYTES = 1 << 20
#: Megatron's arguments whose field has another name.
_RENAMED = {"num_experts": "num_moe_experts", "use_rope_scaling": "rope_scaling"}


def bridge_arguments(folder: Path) -> tuple[dict[str, Any], Path] | None:
    """Return the model that the folder's file states, and the file; ``None`` if there is none."""
    if not (folder / _FILE).is_file():
        return None
    path = contained(folder, _FILE)
    text = read_text(path, _MOST_BYTES)
    if "<<" in text:  # a key that copies others; copies of copies grow without end
        raise BadInput(path, expected="YAML without merge keys", found="<<")
    try:
        stated = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(path, expected="YAML", found=shown(str(error))) from None
    model = stated.get("model") if isinstance(stated, dict) else None
    if not isinstance(model, dict):
        return None
    arguments = {name: value for name, value in model.items() if isinstance(name, str)}
    arguments |= {name: model.get(field) for name, field in _RENAMED.items()}
    arguments["group_query_attention"] = model.get("num_query_groups") is not None
    shared = model.get("share_embeddings_and_output_weights")
    arguments["untie_embeddings_and_output_weights"] = None if shared is None else not shared
    activation = model.get("activation_func")
    target = activation.get("_target_") if isinstance(activation, dict) else activation
    gated = model.get("gated_linear_unit") is True and str(target).endswith("silu")
    arguments["swiglu"] = True if gated else None
    return arguments, path
