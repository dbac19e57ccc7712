"""Build what a run trains with from its recipe: model, step, optimizer, update, learning rates."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..layers import (
    Balancing,
    checked_backend,
    checkpoint_blocks,
    compile_blocks,
    numbered_blocks,
    routers,
    set_auxiliary_losses,
)
from ..models import AdaptedFamily
from ..parallel_state import ParallelState, dtype_named, seed_of
from ..parallel_state.engine import accelerator, to_empty
from ..recipes.checks import without_effect
from ..recipes.recipe import Recipe
from ..recipes.sections import MemorySection
from .callbacks import Callback, ModelFlops, StepLines, Traces
from .evaluation import Evaluation
from .learning_rate import schedule_of
from .optimizer import freeze, make_adamw
from .own_module import OwnFamily, needs_memory
from .parameter_norms import NormLog
from .precision import Precision, multiply_in_float8
from .run_plan import Plan, RunPlan
from .step import Step
from .stragglers import Stragglers
from .token_loss import TokenLoss
from .update import LossScale, Spikes, Update
from .zero_on_fsdp import resting_device, shard_over_data

if TYPE_CHECKING:
    from ..models import CausalLM


def build(recipe: Recipe, plan: Plan, state: ParallelState) -> tuple[Step, Update, list[str]]:
    """Build what makes a rank's gradients, and what uses them; collective. A load or ``initialize`` fills the
    weights of their model afterwards. With float8, return also the names of weights that stay in bfloat16.
    """
    master, compute = dtype_named(recipe.dtype), dtype_named(recipe.compute_dtype)
    precision = Precision(master, compute, dtype_named(recipe.reduce or recipe.dtype))
    model = model_on_meta(recipe, plan, state)
    unquantized = multiply_in_float8(model, recipe.scaling, state)
    count = len([*routers(plan.family.on_meta(plan.config))])  # of all stages
    if (experts := recipe.experts) is not None:  # each router's loss is a part of a mean over all routers
        balance = None if experts.balance is None else experts.balance / count
        set_auxiliary_losses(model, balance=balance, z_loss=experts.z_loss / count)
    if recipe.compiles:
        compile_blocks(numbered_blocks(model).values(), or_without=recipe.compile == "auto")
    spare_memory(model, recipe.memory, plan.loss_chunk, state)
    shard_over_data(model, state, precision, offload=recipe.memory.offload)
    resting = resting_device(state, offload=recipe.memory.offload)
    if any(parameter.is_meta for parameter in model.parameters()):
        to_empty(model, resting)
    section = recipe.optimizer
    settings = section.model_dump(include={"lr", "betas", "eps", "weight_decay"})
    optimizer = make_adamw(model, **settings, groups=plan.groups)
    step = Step(
        model,
        _token_loss(model, recipe, plan.loss_chunk, state) if plan.own is None else plan.own.loss,
        micro_batch=recipe.data.micro_batch,
        schedule=recipe.layout_section.schedule,
        state=state,
    )
    bias_rate = experts.bias_rate if experts is not None else 0.0
    update = Update(
        model,
        optimizer,
        clip=section.clip,
        loss_scale=LossScale(recipe.loss_scale) if compute == torch.float16 else None,
        spikes=Spikes(section.skip_spikes) if section.skip_spikes else None,
        balancing=Balancing(model, rate=bias_rate, state=state) if count else None,
        state=state,
    )
    return step, update, unquantized


def _token_loss(model: CausalLM, recipe: Recipe, chunk: int, state: ParallelState) -> TokenLoss:
    return TokenLoss(
        model,
        label_smoothing=recipe.optimizer.label_smoothing,
        z_loss=recipe.optimizer.z_loss,
        mtp=recipe.model.mtp or 0.0,
        chunk=chunk,
        sums=dtype_named(recipe.reduce) if recipe.reduce else None,
        compiled=recipe.compiles and accelerator.has_compiled_losses(state.device),
    )


def measurements(recipe: Recipe, plan: RunPlan) -> list[Callback]:
    """Return what the recipe asks to be measured beside the steps, in the order of the calls."""
    callbacks: list[Callback] = [ModelFlops()] if plan.own is None else []  # whose FLOPs are known
    callbacks += [Stragglers(), StepLines()]
    if recipe.watch.norms:
        callbacks.append(NormLog())
    callbacks.append(Traces())
    if plan.held_out is not None:
        callbacks.append(Evaluation())
    return callbacks


def choices(recipe: Recipe, plan: RunPlan, state: ParallelState) -> list[str]:
    """Return a line on each choice that the recipe has left open: learning rate, stages, kernels."""
    line = schedule_of(recipe)[1]
    lines = [line] if line else []
    lines += [f"data: {plan.batches.described(recipe.steps)}", *without_effect(recipe)]
    if plan.companions and plan.source is None and recipe.model.tokenizer is None:
        lines.append(f"tokenizer: {plan.companions[0].parent}, that of the token file")
    if plan.split is not None:
        lines.append(f"stages: {plan.cut}")
    if plan.attention:
        words = "; ".join(
            f"{kind}: {checked_backend(call, recipe.attention_backend, state.device)}"
            for kind, call in plan.attention.items()
        )
        lines.append(f"attention over {words}")
    if recipe.compile == "auto" and accelerator.has_compiled_losses(state.device):
        reason = recipe.not_compiled
        lines.append("blocks are compiled" if reason is None else f"blocks are not compiled: {reason}")
    return lines


def model_on_meta(recipe: Recipe, plan: Plan, state: ParallelState) -> Any:
    """Return this rank's part of the model without memory; for any rank, if the state is a stand-in.

    Frozen weights have the dtype that the step computes in: more digits would not be used. A user's module
    whose constructor computes something, such as buffers, is made with memory for a real rank.
    """
    family: Any = plan.family
    make = partial(family.build, plan.config, state=state, dtype=dtype_named(recipe.dtype))
    if isinstance(family, OwnFamily):
        make = partial(make, split=recipe.layout_section.split)
        built = make()
        if state.mesh is not None and needs_memory(built):
            with accelerator.fork_random(state.device):  # what a constructor draws follows the seed
                torch.manual_seed(seed_of(recipe.seed, "module"))
                resting = resting_device(state, offload=recipe.memory.offload)
                built = make(device=resting)
        family.set_up(built)
        return built
    frozen = {"base_dtype": dtype_named(recipe.compute_dtype)} if isinstance(family, AdaptedFamily) else {}
    model = make(split=plan.split, **frozen)
    freeze(model, plan.groups)
    model.pin_attention(recipe.attention_backend)
    return model


def spare_memory(model: Any, memory: MemorySection, loss_chunk: int, state: ParallelState) -> None:
    """Set activation checkpointing and where the logits are made, in place; call it before FSDP.

    ``loss_chunk``: number of tokens, 0 for the whole logits.
    """
    whole, blocks = state.context.size == 1, numbered_blocks(model).items()
    checkpoint_blocks(blocks, memory.checkpointing, interval=memory.every, keep_attention=whole)
    if hasattr(model, "head_in_loss"):
        model.head_in_loss = loss_chunk > 0
