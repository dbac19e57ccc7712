"""Choose a run's layout for the ranks that are left, as ``trilith train --fit`` does."""

from dataclasses import replace
from pathlib import Path

import torch

from ...parallel_state import BadInput
from ...recipes.recipe import Recipe
from ...system import counted
from ..dry_run import device_room
from ..time import MACHINES, Machine
from .choice import recipe_of
from .find import Found, find_layouts
from .request import check_searched, left_as_it_is, request_of

#: Layouts to find: the one to take, and the next, for comparison.
_SHOWN = 2
#: Bytes of a device whose memory nobody states: every layout fits.
_UNKNOWN = 2.0**60


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
