"""Small configs for tests, read by name from JSON files.

``config("llama")`` is the tiny model of a family, with shapes that hide nothing: see ``models/tiny.toml``.
The others stand in ``configs/``; those of ``configs/variants/`` change some fields of one that they are
``like``, and those of ``configs/published/`` have every key of a published file: see ``configs/README.md``.
"""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from trilith.models import FAMILIES, tiny_config

FOLDER = Path(__file__).parent / "configs"
#: Fields that have an entry for each layer.
_BY_LAYER = ("no_rope_layers", "layer_types", "mlp_layer_types")


@cache
def _read(file: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(file.read_text())
    return raw


def _names(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.json"))


#: The names that ``config`` knows, besides those of files in folders, such as ``held/llama``.
NAMES = sorted({*_names(FOLDER), *FAMILIES})


def config(
    name: str, *, layers: int | None = None, without: tuple[str, ...] = (), **changes: Any
) -> dict[str, Any]:
    """Return a new config by the name of its file, with some fields changed or left out.

    ``layers``: the number of blocks, under the family's own name for it; lists with an entry for each layer
    keep one of each kind in turn.
    """
    file = FOLDER / f"{name}.json"
    if name not in FAMILIES and not file.exists():
        raise LookupError(f"no config {name!r}; there are {', '.join(NAMES)}")
    whole = tiny_config(name) if name in FAMILIES else _read(file)
    raw = {key: value for key, value in whole.items() if key not in without}
    if layers is not None:
        for key in _BY_LAYER:
            if raw.get(key):
                kinds = [*dict.fromkeys(raw[key])]
                raw[key] = (kinds * layers)[:layers]
        raw["n_layer" if "n_layer" in raw else "num_hidden_layers"] = layers
    return deepcopy(raw) | changes


#: Every family's tiny models by name, to compare layouts with.
MODELS: dict[str, dict[str, Any]] = {
    name: config(name) for name in NAMES if not name.startswith(("tiny_", "tiniest_"))
}
#: Of these, the models with experts.
EXPERTS = {name for name, raw in MODELS.items() if "num_experts_per_tok" in raw}
#: Published configs with every key of their files, but smaller numbers and fp32.
PUBLISHED = {name: _read(FOLDER / "published" / f"{name}.json") for name in _names(FOLDER / "published")}
_VARIANTS = {name: _read(FOLDER / "variants" / f"{name}.json") for name in _names(FOLDER / "variants")}
#: All of these, and variants: each is ``like`` one of them but for some fields.
CASES = MODELS | {
    name: MODELS[raw["like"]] | {key: value for key, value in raw.items() if key != "like"}
    for name, raw in _VARIANTS.items()
}
CASES |= PUBLISHED

#: The keys of published files by family, for tests that change one of them.
KEYS = {name: _read(FOLDER / "keys" / f"{name}.json") for name in _names(FOLDER / "keys")}

LLAMA, TINY_LLAMA, TINY_MIXTRAL = config("llama"), config("tiny_llama"), config("tiny_mixtral")
TINY_GLM, TINY_GPT2, TINIEST_LLAMA = config("tiny_glm"), config("tiny_gpt2"), config("tiniest_llama")
#: A Llama without biases and without a width of the heads, which is the hidden size by their number.
WHOLE = config("llama", layers=3, without=("attention_bias", "mlp_bias", "head_dim"))
