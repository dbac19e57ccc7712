"""Make a first recipe from a model, a token file and a number of GPUs: the planner chooses the layout."""

import os
from pathlib import Path
from typing import Any

from ...data.token_file import TokenFile
from ...parallel_state import BadInput
from ...recipes.recipe_text import commented_recipe
from ..time import Machine
from .choice import raw_recipe
from .find import Found, find_layouts
from .report import recipe_head
from .request import read_request

#: Fewer steps than this in one pass over the tokens: the global batch becomes smaller.
_STEPS = 100
#: Learning rates to begin with: of adapters, of weights that are trained on, and from scratch.
_RATES = {"lora": 2e-4, "on": 2e-5, "scratch": 3e-4}


def new_recipe(
    model: str,
    tokens: Path,
    machine: Machine,
    gpus: int,
    *,
    sequence_length: int | None = None,
    global_batch: int | None = None,
    steps: int | None = None,
    lora: int | None = None,
) -> tuple[str, Found]:
    """Return the text of a recipe that trains ``model`` on a token file, and the search that chose its
    layout: a Hugging Face folder with weights is trained on, a published size or a config.json from scratch.

    Without ``steps`` it goes over the tokens once; without ``global_batch`` a step has 4 Mi tokens, or less
    so that a pass has 100 steps. Raises ``BadInput`` for what cannot be read, or where no layout fits.
    """
    count = TokenFile.open(tokens).index.tokens
    request = read_request(
        model, machine, gpus, sequence_length=sequence_length, global_batch=global_batch, lora=lora
    )
    length, rows = request.recipe.data.sequence_length, request.recipe.data.global_batch
    if sequence_length is None:
        while length > 128 and length * gpus * _STEPS > count:
            length //= 2
    if count <= length:
        todo = "Add text, or give a smaller --sequence-length"
        raise BadInput(tokens, "tokens", expected=f"at least {length + 1:,}", found=f"{count:,}", todo=todo)
    if global_batch is None:
        rows = max(gpus, min(rows, count // (length * _STEPS)) // gpus * gpus)
    request = read_request(model, machine, gpus, sequence_length=length, global_batch=rows, lora=lora)
    search = find_layouts(request, shown=2)
    raw = raw_recipe(request, search.best[0].choice)
    if os.path.isdir(model) and lora is None and any(Path(model).glob("*.safetensors*")):
        raw["model"] = {"init_from": model}
    kind = "lora" if lora else "on" if "init_from" in raw["model"] else "scratch"
    steps = steps or max(1, count // (length * rows))
    return commented_recipe(_filled(raw, tokens, steps, _RATES[kind]), recipe_head(search)), search


def _filled(raw: dict[str, Any], tokens: Path, steps: int, rate: float) -> dict[str, Any]:
    """Return the recipe with what a search leaves open, so that there is something to change."""
    if "config" in raw["model"] and "init_from" in raw["model"]:  # a plan without weights read it there
        raw["model"] = {"init_from": raw["model"]["init_from"]}
    data = {"tokens": str(tokens), **{key: value for key, value in raw["data"].items() if key != "tokens"}}
    optimizer = {"lr": rate, "warmup": min(2000, max(1, steps // 20))}
    checkpoint = {"every": max(1, min(1000, steps // 10))}
    return {**raw, "steps": steps, "data": data, "optimizer": optimizer, "checkpoint": checkpoint}
