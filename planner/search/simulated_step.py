"""Run one rank's real step on the simulated device, and return what it held and did."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...checkpoints import begin_moments
from ...data import Batch
from ...parallel_state import ParallelState, engine
from ...parallel_state.engine import accelerator, local_data
from ...pipeline.relay import StageOutput
from ...recipes.recipe import Recipe
from ...simulation.backend import NAME, register
from ...simulation.kernels import Kernels, computing_as
from ...simulation.ledger import PHASES, Ledger, StepRecord
from ...simulation.rank import axes_of_groups, simulated_rank
from ...simulation.waits import WAITS
from ...training import precision
from ...training.build import build
from ...training.loss import FunctionLoss, Loss
from ...training.run_plan import Plan, plan
from ...training.samples import some_samples
from ...training.step import Step
from ...training.step_sums import StepResult
from ..dry_run import work_of
from ..planned_model import own_model

#: Pieces of the timeline: as many as a picture has columns.
PIECES = 600


def simulate_step(
    recipe: Recipe, rank: int = 0, *, planned: Plan | None = None, kernels: Kernels | None = None
) -> StepRecord:
    """Return the record of the second step of one rank of a recipe's layout.

    ``planned``: what ``plan`` returns for the recipe, if it is known. ``kernels``: a GPU's or a CPU's; the
    default is the recipe's device. The blocks are not compiled. It starts a process group and a device that
    torch cannot forget, so call it in a process that does nothing else (``simulation_worker.py``).
    """
    register()  # before the first backward of a plan, which counts the devices that torch knows
    planned = planned or plan(recipe)
    recipe = recipe.model_copy(update={"compile": False})
    kernels = kernels or ("gpu" if recipe.device == "cuda" else "cpu")
    rows, length = recipe.data.global_batch // recipe.layout.data, recipe.data.sequence_length
    outputs = _outputs_of_stages(recipe, planned)
    with ledger_of_rank(recipe.layout, rank, kernels) as (state, ledger):
        step, update, _ = build(recipe, planned, state)
        own = planned.own
        # A first step makes everything ready: with one micro-batch, unless stages' schedule asks for all.
        few = rows if recipe.layout.pipeline > 1 else recipe.data.micro_batch
        ids = torch.arange(rows * length).view(rows, length) % planned.config.vocab_size
        batch: Any = Batch(ids, ids.roll(-1, 1))
        first: Any = Batch(batch.input_ids[:few], batch.labels[:few])
        if own is not None:
            batch = {name: torch.zeros(rows, *x.shape[1:], dtype=x.dtype) for name, x in own.samples.items()}
            first = some_samples(batch, 0, few)
            if outputs:  # one rank alone cannot try them all
                step.stages.assume(outputs)
        return simulated_steps(ledger, step, update.optimizer, [first, batch], update, kernels)


def _outputs_of_stages(recipe: Recipe, planned: Plan) -> list[StageOutput]:
    """Return what the stages of a user's module give, found where no group stands for those of its ranks; an
    empty list without stages.
    """
    if planned.own is None or recipe.layout.pipeline == 1:
        return []
    model = own_model(planned.own, planned.config, recipe.layout)
    return model.outputs(work_of(recipe, planned), recipe.layout_section.split)


@contextmanager
def ledger_of_rank(layout: Any, rank: int, kernels: Kernels) -> Iterator[tuple[ParallelState, Ledger]]:
    """Yield the state of a rank on the simulated device, and the ledger of what happens there, entered."""
    # On a CPU the host's memory is the device's.
    ledger = Ledger(NAME) if kernels == "gpu" else Ledger(NAME, "cpu")
    rank_there = simulated_rank(layout, rank, WAITS, strict=False)
    with rank_there as (state, _), _computing_as(kernels), ledger:
        yield state, ledger


def simulated_steps(
    ledger: Ledger,
    step: Step,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Any],
    update: Callable[[StepResult], object],
    kernels: Kernels,
) -> StepRecord:
    """Run a step for each batch, and return the record of the last one.

    ``update``: what follows the launch of a step.
    """
    model, state = step.model, step.state
    ledger.name(model)
    begin_moments(model, optimizer)
    in_state = (entry for entries in optimizer.state.values() for entry in entries.values())
    moments = [entry for entry in in_state if isinstance(entry, Tensor)]
    ledger.mark("moments", moments)
    # A run asks a function once whether it is a loss. Without numbers nothing answers: each step would ask.
    asked_once = mock.patch.object(FunctionLoss, "find_faults", Loss.find_faults)
    with (
        engine.watched(engine.fsdp_modules(model), ledger.around_fsdp),
        _casts_marked(model, ledger),
        asked_once,
    ):
        for batch in batches:
            ledger.clear()
            scale = getattr(update, "scale", 1.0)
            result = step.launch(batch, scale=scale)
            # A name for the list would keep the gradients alive through the next step.
            ledger.mark(
                "gradients",
                [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
            )
            ledger.updating = True
            update(result)
            ledger.updating = False
    axes = axes_of_groups(state)
    sent = [replace(call, axis=axes.get(call.axis, call.axis)) for call in ledger.collectives]
    stored = [*model.parameters(), *moments]
    return StepRecord(
        rank=state.rank,
        kernels=kernels,
        peak=ledger.peak,
        host=sum(local_data(tensor).nbytes for tensor in stored if tensor.device.type == "cpu"),
        holders=ledger.holders(),
        timeline=timeline(ledger),
        collectives=sent,
        operators=[*ledger.operators.values()],
    )


def timeline(ledger: Ledger) -> list[tuple[str, int]]:
    """Return the most bytes in each piece of the step, and the phase that ran then."""
    count = len(ledger.bytes_after)
    pieces = min(PIECES, count)
    bounds = [piece * count // pieces for piece in range(pieces + 1)] if pieces else []
    places = [max(range(*pair), key=ledger.bytes_after.__getitem__) for pair in pairwise(bounds)]
    return [(PHASES[ledger.phases[place]], ledger.bytes_after[place]) for place in places]


@contextmanager
def _computing_as(kernels: Kernels) -> Iterator[None]:
    """Let operators be the kernels of a GPU or a CPU: the one place at which these are chosen."""
    place = accelerator._type

    def as_host(device: accelerator.Device) -> str:
        return "cpu" if (kind := place(device)) == NAME else kind

    as_cpu = mock.patch.object(accelerator, "_type", as_host) if kernels == "cpu" else nullcontext()
    with as_cpu, computing_as(kernels):
        yield


@contextmanager
def _casts_marked(model: nn.Module, ledger: Ledger) -> Iterator[None]:
    """Mark the weights that a rank without FSDP computes with, and their gradients."""
    add_gradient = precision.add_gradient

    def marked(copy: torch.Tensor, dtype: torch.dtype) -> None:
        ledger.mark("weights in the dtype of compute", [copy])
        ledger.mark("gradients", [copy.grad] if copy.grad is not None else [])
        add_gradient(copy, dtype)
        ledger.mark("gradients", [vars(copy)["total"]] if "total" in vars(copy) else [])

    with mock.patch.object(precision, "add_gradient", marked):
        yield
