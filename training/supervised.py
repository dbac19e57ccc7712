"""Train a recipe on the ranks of its layout, supervised: if it fails, one message says why."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.find import STRICT
from ..models import AdaptedFamily
from ..parallel_state import BadInput, dtype_named, launched, require
from ..parallel_state.host_memory import check_host_memory
from ..recipes.recipe import Recipe, load_recipe, with_overrides
from ..runs.flight_recorder import keeping_nccl_record
from ..runs.guard import watched
from ..runs.heartbeat import status_folder, this_start
from ..runs.launch import check_launch, check_local, device_here, launch, own_rank, process_group
from ..runs.lock import inherits_lock, lock_folder, only_run_in
from ..runs.rendezvous import wait_as_spare
from ..runs.requests import StopSignals
from ..runs.trackers import Tracker
from ..system import counted
from .callbacks import Callback
from .run_plan import Plan, RunPlan, check_run
from .trainer import Trainer

#: Takes a recipe and the number of ranks that are left. Returns the recipe in a layout of at most that many
#: ranks, and a line that names the layout and the reason. ``trilith.planner.search.fit`` is one.
Fit = Callable[[Recipe, int], tuple[Recipe, str]]


def run(
    recipe: Recipe | str | Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    quiet: bool = False,
    trackers: Sequence[Tracker] = (),
    callbacks: Sequence[Callback] = (),
    fit: Fit | None = None,
) -> int:
    """Train a model as a recipe says, or resume its training; ``trilith train`` calls this function.

    ``recipe``: a TOML file, the name of a recipe that comes with trilith, or a ``Recipe``. ``overrides``
    change it, such as ``layout.tensor=2``. A layout of one rank trains in this process, and so does each
    process that torchrun, srun or mpirun started. For other layouts the ranks are started here, and each
    reads the file by itself. ``ranks``, if given, must be the layout's number of ranks. ``quiet``: no
    progress lines. ``trackers``: objects that get the figures of each step beside those of the recipe's key
    ``watch.trackers``, such as an ``accelerate.tracking.GeneralTracker`` of your own; the first rank calls
    them. ``callbacks``: measurements of your own (``Callback``), beside those of the recipe.

    With ``fit`` the recipe's layout gives way to one for the ranks that are left: those that a launcher
    started, otherwise ``ranks``, otherwise one for each GPU of this machine. Ranks that this layout does not
    use wait for the end.

    Only one run may use a folder at a time. After SIGTERM or SIGINT the run saves and stops (``Preempted``).
    It writes each rank's heartbeat and last message into the folder, and names the rank that failed
    (``PeerFailed``).

    Returns 0, or the exit code of the first failed rank of those started here, whose reason is on standard
    error. Raises ``BadInput`` before anything starts, also for a ``Recipe`` that is in no file if ranks must
    be started.
    """
    if isinstance(recipe, Recipe):
        loaded, file = with_overrides(recipe, overrides), None
    else:
        loaded, file = load_recipe(recipe, overrides), str(recipe)
    loaded = loaded.on(device_here(loaded.device))
    process, reason = launched(), ""
    if fit is not None:
        devices = torch.cuda.device_count() if loaded.device == "cuda" else loaded.layout.world
        loaded, reason = fit(loaded, process.world if process else ranks or max(1, devices))
        ranks = None
    layout, out = loaded.layout, Path(loaded.out)
    options = {"quiet": quiet, "trackers": trackers, "callbacks": callbacks, "layout_change_reason": reason}
    train = partial(_train, loaded, options)
    if process:
        if fit is not None and process.rank >= layout.world:
            wait_as_spare(process, timedelta(seconds=loaded.timeout))
            return 0
        if fit is not None:
            os.environ.update(replace(process, world=layout.world).variables)
        train(None)
        return 0
    if ranks is not None:
        layout.check_world(ranks)
    check_local(layout, device=loaded.device)
    plan = check_run(loaded)  # bad input is said once and at once, before any rank starts
    check_memory(loaded, plan)
    if layout.world == 1:
        train(plan)
        return 0
    ranks_to_start = counted(layout.world, "rank")
    require(
        not trackers and not callbacks, "run", "trackers" if trackers else "callbacks",
        "ranks that torchrun has started, or one rank",
        f"{ranks_to_start} to start, which cannot be handed an object", "Start your script with torchrun",
    )  # fmt: skip
    if file is None:
        expected = f"a file, which the {ranks_to_start} can read"
        todo = "Give the file's name, or start the ranks with torchrun"
        raise BadInput("run", "recipe", expected=expected, found="a Recipe", todo=todo)
    plan.let_go()  # the ranks make plans of their own
    switches = {"--quiet": quiet, "--fit": fit, "--strict": STRICT.get()}
    arguments = ["train", file, *overrides, *(switch for switch, is_set in switches.items() if is_set)]
    with lock_folder(out) as lock:
        return launch(arguments, layout.world, status_folder(out), lock=lock)


def check_memory(recipe: Recipe, planned: Plan) -> None:
    """Refuse a run of which this host, with all ranks on it, cannot hold the weights."""
    if recipe.device != "cpu" and not recipe.memory.offload:
        return
    family = planned.family.base if isinstance(planned.family, AdaptedFamily) else planned.family
    split = planned.split if planned.own is None else recipe.layout_section.split  # else its class cuts
    stages = family.declarations(planned.config, recipe.layout, split=split)
    trained = recipe.lora is None and not planned.groups  # else some weights are frozen
    itemsize = dtype_named(recipe.dtype).itemsize
    check_host_memory(stages, recipe.layout, itemsize=itemsize, trained=trained)


def _train(recipe: Recipe, options: Mapping[str, Any], plan: RunPlan | None) -> None:
    """Train this process's rank of the run. ``options``: the trainer's. ``plan``: if it is already made."""
    layout, out = recipe.layout, Path(recipe.out)
    check_launch(layout, device=recipe.device)
    handed_on = launched() is not None and inherits_lock(out)
    with (
        deterministic(recipe.deterministic),
        StopSignals(recipe.grace) as signals,
        watched(
            status_folder(out), own_rank(), layout.world, run=this_start() if handed_on else None
        ) as beat,
        keeping_nccl_record(status_folder(out)),
        process_group(
            layout,
            device=recipe.device,
            timeout=timedelta(seconds=recipe.timeout),
            files_timeout=timedelta(seconds=recipe.checkpoint.timeout),
            alike={"device": recipe.device, "recipe": recipe.digest},
        ) as state,
        only_run_in(out, state) as start,
    ):
        beat.publish(start)
        Trainer(recipe, state, plan, beat=beat, signals=signals, **options).run()


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Make torch take deterministic algorithms, if ``on``; where it has none it raises ``RuntimeError``.

    Enter it before anything runs on CUDA: cuBLAS reads only once how much workspace it may use, and its order
    of sums depends on that. A value that the user has set in the environment stays. Everything is restored at
    the end.
    """
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = "CUBLAS_WORKSPACE_CONFIG"
    is_unset = workspace not in os.environ
    if is_unset:
        os.environ[workspace] = ":4096:8"  # of the two that NVIDIA names, the faster
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        if is_unset:
            del os.environ[workspace]
