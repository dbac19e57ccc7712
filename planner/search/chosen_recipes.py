"""Make a recipe whose layout is searched for: a first one, or one for the ranks that are left (``--fit``)."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...data.token_file import TokenFile
from ...parallel_state import BadInput
from ...recipes.recipe import Recipe
from ...recipes.recipe_text import commented_recipe
from ...system import counted
from ..dry_run import device_room
from ..time import MACHINES, Machine
from .choice import raw_recipe, recipe_of
from .find import Found, find_layouts
from .report import recipe_head
from .request import check_searched, left_as_it_is, read_request, request_of

#: Fewer steps than this in one pass over the tokens: the global batch becomes smaller.
_STEPS = 100
#: Learning rates to begin with: of adapters, of weights that are trained on, and from scratch.
_RATES = {"lora": 2e-4, "on": 2e-5, "scratch": 3e-4}
#: Layouts to find: the one to take, and the next, for comparison.
_SHOWN = 2
#: Bytes of a device whose memory nobody states: every layout fits.
_UNKNOWN = 2.0**60


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


def fit(recipe: Recipe, ranks: int) -> tuple[Recipe, str]:
    """Return the recipe with the fastest layout for at most ``ranks`` ranks, and a line with the reason.

    If ``ranks`` is the recipe's own number of ranks, the recipe keeps its layout. Otherwise layouts of all
    ranks are tried first, then of one rank fewer, and so on, until a layout is legal and fits: the global
    batch may not divide evenly over all ranks. Everything that decides the loss curve stays: model, data and
    their order, global batch, optimizer. Raises ``BadInput`` if no layout fits, and for a recipe with float8
    or frozen groups of parameters, which the search does not plan.
    """
    machine, refused = _machine(recipe), None
    raw = left_as_it_is(recipe)
    raw.get("watch", {}).pop("trace_ranks", None)  # they may not be there
    for used in range(ranks, 0, -1):
        if used == recipe.layout.world:
            return recipe, _line(recipe, ranks, used, "the recipe's own layout")
        todo = "Name a layout in place of --fit, such as layout.data=2, or start the recipe's number of ranks"
        check_searched(recipe, "train", "--fit", todo)
        request = request_of(Path(recipe.out).name, raw, machine, used)
        try:
            search = find_layouts(request, shown=_SHOWN)
        except BadInput as error:
            refused = refused or error
            continue
        return recipe_of(request, search.best[0].choice), _line(recipe, ranks, used, _reason(search))
    assert refused is not None
    raise BadInput(
        "train",
        "--fit",
        expected=f"a legal layout of at most {counted(ranks, 'rank')} that fits",
        found=f"none: {refused.expected}, found {refused.found}",
        todo="Start more ranks; `trilith plan RECIPE --gpus N` says what N ranks hold",
    )


def _line(recipe: Recipe, ranks: int, used: int, reason: str) -> str:
    idle = ranks - used
    waits = f"; ranks that wait: {idle}, for no layout of more than {used} is legal and fits" if idle else ""
    return f"fit: ranks here: {ranks}, in the recipe: {recipe.layout.world}: {reason}{waits}"


def _reason(search: Found) -> str:
    best = search.best[0]
    words = f"{best.choice}, by the plan the fastest of {search.legal:,} legal layouts"
    if len(search.best) == 1:
        return words
    second = search.best[1]
    return f"{words}; next is {second.choice}, {second.time.seconds / best.time.seconds:.2f} times as long"


def _machine(recipe: Recipe) -> Machine:
    """Return the machine that the ranks' layouts are compared on: this one's kind of GPU.

    A GPU that the table has not, and a CPU, are compared as the table's first machine: only the order of
    layouts counts. The memory is that of the device here, or what the recipe states.
    """
    name = torch.cuda.get_device_name() if recipe.device == "cuda" and torch.cuda.is_available() else ""
    machine = next((row for row in MACHINES.values() if row.words in name), next(iter(MACHINES.values())))
    room = device_room(recipe)
    memory = _UNKNOWN if room is None else float(room)
    peaks = {"float64": machine.peaks["float32"] / 2, **machine.peaks}
    return replace(machine, memory=memory, peaks=peaks)
