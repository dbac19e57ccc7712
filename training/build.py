"""What a run trains with, built from its recipe: the model in its layout, the optimizer, the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layers import checkpoint_blocks
from ..models import AdaptedFamily, CausalLM
from ..parallel_state import ParallelState
from .data_parallel import resting_device, shard_over_data
from .optimizer import make_adamw
from .precision import Precision, dtype_named
from .recipe import Recipe
from .run_plan import Plan
from .sections import MemorySection
from .step import TrainStep


@dataclass(frozen=True)
class Parts:
    """One rank's model (weights not yet filled), its optimizer, and the step that ties them."""

    model: CausalLM
    optimizer: torch.optim.Optimizer
    step: TrainStep


def build(recipe: Recipe, plan: Plan, state: ParallelState) -> Parts:
    """Collective: every rank builds its own part. The weights are filled after it, by a load or
    ``initialize``.
    """
    master = dtype_named(recipe.dtype)
    precision = Precision(master, dtype_named(recipe.compute or recipe.dtype), master)
    model = _model(recipe, plan, state, precision)
    spare_memory(model, recipe.memory)
    shard_over_data(model, state, precision, offload=recipe.memory.offload)
    model.to_empty(device=resting_device(state, offload=recipe.memory.offload))
    wanted = recipe.optimizer
    optimizer = make_adamw(
        model, lr=wanted.lr, betas=wanted.betas, eps=wanted.eps, weight_decay=wanted.weight_decay
    )
    step = TrainStep(
        model,
        micro_batch=recipe.data.micro_batch,
        schedule=recipe.layout.schedule,
        label_smoothing=wanted.label_smoothing,
        dtype=precision.compute,
        loss_chunk=recipe.memory.loss_chunk,
    )
    return Parts(model, optimizer, step)


def _model(recipe: Recipe, plan: Plan, state: ParallelState, precision: Precision) -> CausalLM:
    """On the meta device. What is frozen needs no digits beyond those that the step computes with."""
    family, split, master = plan.family, recipe.layout.split, precision.master
    if isinstance(family, AdaptedFamily):
        return family.build(plan.config, split=split, state=state, dtype=master, base_dtype=precision.compute)
    return family.build(plan.config, split=split, state=state, dtype=master)


def spare_memory(model: CausalLM, memory: MemorySection) -> None:
    """Activation checkpointing and where the logits are made: before FSDP takes the model, in place."""
    blocks = ((int(number), block) for number, block in model.layers.items())
    checkpoint_blocks(blocks, memory.checkpointing, every=memory.checkpoint_every)
    model.head_in_loss = memory.loss_chunk > 0
