"""Compute a run without starting it: each rank's memory, the step's numbers, whether it fits.

Any number of ranks takes seconds: a rank's model is built on the meta device, with no process and no group.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..models import AdaptedFamily, LoraConfig, adapted
from ..parallel_state import BadInput, Layout, ParallelState, dtype_named
from ..pipeline import bubble
from ..recipes.recipe import Recipe
from ..runs.launch import device_here
from ..simulation.model_flops import TokenFlops, parameters_of
from ..system.addresses import can_be_read
from ..training.lora import recipe_shape
from ..training.run_data import within_reach
from ..training.run_plan import Plan, check_data, flops_of, loss_chunk_of, plan
from ..training.stage_cut import StageCut
from .communication import Traffic, traffic_of
from .memory import MemoryPlan, memory_of, reserved_bytes, runtime_of, usable
from .planned_model import PlannedModel, of_own_module, planned_model
from .remedies import Remedy, changes_of, keys_of, remedies
from .sampled_model import Asked
from .step_shape import Work, sizes_of
from .time import Machine, StepTime, StepTimer


@dataclass(frozen=True)
class RankPlan:
    """Describe one rank of a recipe: its memory, its parameters in use and stored, what it sends."""

    rank: int
    memory: MemoryPlan
    runtime: int
    parameters: int
    stored: int
    trained: int
    traffic: list[Traffic]  # a step's collectives

    @property
    def total(self) -> int:
        return self.memory.total + self.runtime

    @property
    def reserved(self) -> int:
        """Return the bytes that torch's allocator reserves on a GPU, with those of the runtime."""
        return reserved_bytes(self.memory.total) + self.runtime


@dataclass(frozen=True)
class DryRun:
    """Hold the results of ``dry_run``. ``notes``: what would stop a real run. ``device``: its bytes, of which
    a rank may use ``room``; ``None`` if unknown.
    """

    recipe: Recipe
    parameters: int
    #: The parameters that one token uses: fewer if it goes through some of many experts.
    active: int
    rank: RankPlan
    micro_batches: int
    bubble: float
    cut: StageCut
    flops: TokenFlops
    device: int | None
    room: int | None
    remedies: list[Remedy]
    notes: list[str]

    @property
    def tokens(self) -> int:
        return self.recipe.data.global_batch * self.recipe.data.sequence_length

    def check(self, where: str) -> None:
        """Raise ``BadInput`` if the rank does not fit its device; it names the excess and changes that
        would fit.
        """
        if self.room is None or self.rank.total <= self.room:
            return
        share = 1 - self.recipe.memory.headroom
        ways = "; or ".join(f"{fit.overrides} ({fit.total / 1e9:.1f} GB)" for fit in self.remedies)
        keys = dict.fromkeys(key for change in changes_of(self.recipe) for key in keys_of(change))
        tried = "nothing in the recipe is left to change"
        if keys:
            tried = f"{', '.join(keys)} do not suffice, alone or together"
        raise BadInput(
            where,
            f"memory of rank {self.rank.rank}",
            expected=f"at most {self.room / 1e9:.1f} GB, {share:.0%} of the device's",
            found=f"{self.rank.total / 1e9:.1f} GB, {(self.rank.total - self.room) / 1e9:.1f} GB too much",
            todo=f"Cheapest first: {ways}" if ways else f"Take more ranks: {tried}",
        )


def dry_run(recipe: Recipe, *, rank: int | None = None, device: int | None = None) -> DryRun:
    """Compute the dry run of a checked recipe for ``rank``; default: the rank that needs most memory.

    ``device``: its bytes. The default is the recipe's ``memory.device_gb``, or else the memory of this
    machine's GPU if the recipe runs on one; ``memory.headroom`` of it stays free. Stated bytes make ``auto``
    a GPU. Raises ``BadInput`` if the run could not be built, and for a rank that the layout does not have.
    """
    recipe = recipe.on(device_here(recipe.device, gpu=(device or recipe.memory.device_gb) is not None))
    planned, missing = plan_without_weights(recipe)
    batches, held_out, not_read = within_reach(recipe, planned.config.vocab_size)
    if batches is not None:
        check_data(recipe, planned, batches, held_out)
    base = planned.family.base if isinstance(planned.family, AdaptedFamily) else planned.family
    chosen = rank_plan(recipe, planned, rank) if rank is not None else heaviest(recipe, planned)
    parameters = parameters_of(base.on_meta(planned.config))
    device = device if device is not None else device_room(recipe)
    room = None if device is None else usable(device, recipe.memory.headroom)
    micro_batches = _micro_batches(recipe)

    def total(changed: Recipe) -> int:
        return heaviest(changed, plan_without_weights(changed)[0]).total

    return DryRun(
        recipe,
        parameters.whole,
        parameters.active,
        chosen,
        micro_batches,
        bubble(recipe.layout_section.schedule, recipe.layout, micro_batches),
        planned.cut,
        _flops(recipe, planned),
        device,
        room,
        [] if room is None or chosen.total <= room else remedies(recipe, total, room),
        missing + not_read,
    )


def _flops(recipe: Recipe, planned: Plan) -> TokenFlops:
    if planned.own is None:
        return flops_of(recipe, planned)
    return planned_model(planned.family, planned.config, Layout()).flops(recipe.data.sequence_length)


def heaviest(recipe: Recipe, planned: Plan) -> RankPlan:
    """Return the plan of the rank that needs most memory.

    Only the ranks that differ in memory are planned: the first of each pipeline stage.
    """
    layout = recipe.layout
    plans = [rank_plan(recipe, planned, layout.first_rank(stage)) for stage in range(layout.pipeline)]
    return max(plans, key=lambda plan: plan.total)


def rank_plan(recipe: Recipe, planned: Plan, rank: int) -> RankPlan:
    """Plan the memory of one rank of the recipe's layout."""
    work = work_of(recipe, planned, rank)
    model = _model_of(recipe, planned)
    parameters, costs = model.parameters(work.state, planned.split), model.costs(work, planned.split)
    runtime = runtime_of(recipe.device)
    totals = parameters.every
    memory, traffic = memory_of(work, parameters, costs), traffic_of(work, parameters, costs)
    if recipe.device == "cpu" and memory.host:  # one memory: the gradients that go there are not copied
        trained = totals.trained_sharded * work.master
        memory = replace(memory, weights=memory.host - 3 * trained, moments=2 * trained, host=0)
    return RankPlan(rank, memory, runtime, totals.unsharded, totals.sharded, totals.trained_sharded, traffic)


def work_of(recipe: Recipe, planned: Plan, rank: int = 0) -> Work:
    """Return the step of one rank of the recipe's layout, as the planner describes it."""
    work = Work(
        ParallelState.stand_in(recipe.layout, rank),
        planned.config.hidden_size,
        recipe.data.sequence_length,
        recipe.data.micro_batch,
        _micro_batches(recipe),
        schedule=recipe.layout_section.schedule,
        checkpointing=recipe.memory.checkpointing,
        checkpoint_every=recipe.memory.every,
        loss_chunk=planned.loss_chunk,
        offload=recipe.memory.offload,
        **sizes_of(recipe),
    )
    if planned.own is None:
        return work
    return of_own_module(work, planned_model(planned.family, planned.config, recipe.layout), planned.split)


def predicted_step(recipe: Recipe, planned: Plan, machine: Machine) -> StepTime:
    """Return the time of a step of the recipe on a machine, without what saving adds."""
    work = work_of(recipe, planned)
    peak = "float8" if recipe.compute == "float8" else recipe.compute_dtype
    timer = StepTimer(
        _model_of(recipe, planned), work, machine, split=planned.split, compiled=recipe.compiles, dtype=peak
    )
    return timer.time()


def _model_of(recipe: Recipe, planned: Plan) -> PlannedModel:
    """Return what plans the ranks of a recipe, which may treat some blocks differently."""
    groups, frozen = tuple(sorted(planned.groups.items())), dtype_named(recipe.compute_dtype)
    settings = Asked(groups, recipe.scaling, recipe.attention_backend, frozen)
    return planned_model(planned.family, planned.config, recipe.layout, settings)


def plan_without_weights(recipe: Recipe) -> tuple[Plan, list[str]]:
    """Return the plan, and what is missing: with ``model.config`` in the recipe, weights need not be here."""
    if recipe.model.init_from is None or recipe.model.config is None:
        return plan(recipe), []
    try:
        return plan(recipe), []
    except BadInput as error:
        if Path(recipe.model.init_from).exists():
            raise
        missing = [f"weights: {error}"]
    bare = recipe.model.model_copy(update={"init_from": None})
    planned = plan(recipe.model_copy(update={"model": bare, "lora": None}))
    if recipe.lora is None:
        return planned, missing
    lora = LoraConfig()
    if recipe.lora.init_from is None or can_be_read(recipe.lora.init_from):
        lora = recipe_shape(recipe.lora)
    else:
        missing.append(
            f"adapters: no {recipe.lora.init_from}: counted as r={lora.r} on {lora.target_modules}"
        )
    family, _ = adapted(planned.family, lora).of_trained(planned.config)
    family.check(planned.config, "recipe: lora")
    return replace(planned, family=family, loss_chunk=loss_chunk_of(recipe, planned.config)), missing


def _micro_batches(recipe: Recipe) -> int:
    return recipe.data.global_batch // (recipe.layout.data * recipe.data.micro_batch)


def device_room(recipe: Recipe) -> int | None:
    """Return the bytes of a device: those that the recipe states, or of the GPU here; ``None`` if unknown."""
    if recipe.memory.device_gb is not None:
        return int(recipe.memory.device_gb * 1e9)
    if recipe.device == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return None
