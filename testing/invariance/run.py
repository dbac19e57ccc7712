"""Run a user's module in one layout: take some steps, record everything seen, save and load a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...checkpoints import load_module, save_module
from ...parallel_state import (
    BadInput,
    Box,
    Constant,
    Declaration,
    Layout,
    Normal,
    Own,
    ParallelState,
    alone_or,
    clip_gradients,
    declarations,
    initialize,
    seed_of,
    stored_box,
)
from ...parallel_state.engine import local_data
from ...parallel_state.initial_weights import fill
from ...ranks.pickling import FunctionName, unpack
from ...training.adamw import make_adamw
from ...training.precision import Precision
from ...training.user_step import ModuleStep, Samples, own_samples
from ...training.zero_on_fsdp import shard_over_data, stacks_of_experts
from .recorder import Seen, Witness

Held = dict[str, tuple[Box, Tensor]]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Trial:
    """State what every rank has to do. ``given``: arguments for the factory and the batch, packed."""

    factory: FunctionName
    loss: FunctionName | None
    given: bytes
    micro_batch: int
    steps: int
    clip: float
    lr: float
    seed: int
    schedule: str
    dtype: torch.dtype

    def make(self) -> tuple[Callable[..., nn.Module], Callable[..., Any], Samples]:
        """Make the factory, the loss and the batch in this process.

        The user's file is loaded first: its classes may be among the arguments.
        """
        factory = self.factory.load()
        loss = _spread if self.loss is None else self.loss.load()
        args, keywords, batch = unpack(self.given)
        wide = {n: one.to(self.dtype) if one.is_floating_point() else one for n, one in batch.items()}
        return partial(factory, *args, **keywords), loss, wide


@dataclass
class Witnessed:
    """Hold what was seen on one rank.

    ``shapes``: the declared whole shapes. ``undeclared``: names of parameters without a declaration.
    ``misfits``: by name, how a parameter is held otherwise than declared.
    """

    shapes: Shapes
    undeclared: frozenset[str]
    misfits: dict[str, str] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Held = field(default_factory=dict)
    declared: dict[str, Declaration] = field(default_factory=dict)
    weights: Held = field(default_factory=dict)


def alone(trial: Trial, write: str | None) -> Witnessed:
    """Run the trial on one process without a layout: ``state=None``, torch's own clipping."""
    torch.set_default_dtype(trial.dtype)
    factory, loss, batch = trial.make()
    model = factory(state=None)
    _fill(model, trial.seed, ParallelState.alone())
    found = _witnessed(model, ParallelState.alone())
    step = ModuleStep(model, loss, micro_batch=trial.micro_batch)
    optimizer = _train(
        trial, model, step, batch, found,
        lambda: nn.utils.clip_grad_norm_(model.parameters(), trial.clip),
    )  # fmt: skip
    if write is not None:
        save_module(write, model, optimizer, step=trial.steps)
    return found


def in_layout(
    trial: Trial, layout: Layout, expected: Shapes, read: str | None, write: str | None
) -> Witnessed:
    """Run the trial in a process group of the layout's ranks.

    ``read``: a checkpoint to load at the end; ``write``: the place to write it again.
    """
    torch.set_default_dtype(trial.dtype)
    state = ParallelState.start(layout)
    factory, loss, batch = trial.make()
    model = factory(state=state)
    found = _witnessed(model, state)
    everywhere: list[Any] = [None] * layout.world
    misfit = bool(found.misfits) or any(expected.get(n) != shape for n, shape in found.shapes.items())
    dist.all_gather_object(everywhere, (misfit, set(found.shapes)))
    if any(bad for bad, _ in everywhere) or set().union(*(names for _, names in everywhere)) != set(expected):
        return found  # nothing that follows would say more
    first = state.data_index * (_count(batch) // layout.data // trial.micro_batch)
    # Experts that are dealt out are given other rows on each rank; what their mixture gives is compared.
    apart = stacks_of_experts(model) if layout.expert > 1 else []
    witness = Witness(model, first=first, partly=layout.pipeline > 1, apart=apart)
    shard_over_data(model, state, Precision(trial.dtype, trial.dtype, trial.dtype))
    _fill(model, trial.seed, state)
    step = ModuleStep(model, loss, micro_batch=trial.micro_batch, schedule=trial.schedule, state=state)
    optimizer = _train(
        trial, model, step, own_samples(batch, state), found,
        lambda: clip_gradients(model, trial.clip, state=state), witness=witness, state=state,
    )  # fmt: skip
    if write is not None:
        if read is not None:
            load_module(read, model, optimizer, state=state)
        save_module(write, model, optimizer, step=trial.steps, state=state)
    return found


def _train(
    trial: Trial,
    model: nn.Module,
    step: ModuleStep,
    batch: Samples,
    found: Witnessed,
    clip: Callable[[], Tensor],
    *,
    witness: Witness | None = None,
    state: ParallelState | None = None,
) -> torch.optim.Optimizer:
    witness, state = witness or Witness(model), alone_or(state)
    optimizer = make_adamw(model, lr=trial.lr)
    for number in range(trial.steps):
        found.losses.append(float(step(batch)))
        if number == 0:
            found.seen = witness.leave()
            found.gradients = _held(model, state, lambda parameter: parameter.grad)
        found.norms.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
    found.weights = _held(model, state, lambda parameter: parameter)
    return optimizer


def _witnessed(model: nn.Module, state: ParallelState) -> Witnessed:
    stated = declarations(model)
    modules = dict(model.named_modules())
    undeclared = {
        name for name in stated
        if name.rpartition(".")[2] not in modules[name.rpartition(".")[0]].__dict__.get("declared", {})
    }  # fmt: skip
    found = Witnessed({n: one.shape for n, one in stated.items()}, frozenset(undeclared), declared=stated)
    for name, parameter in model.named_parameters():
        promised = stated[name].box(state.layout, state.at).shape
        if promised != (held := tuple(local_data(parameter).shape)):
            found.misfits[name] = f"declared so that a rank holds {promised}, and it holds {held}"
    return found


def _fill(model: nn.Module, seed: int, state: ParallelState) -> None:
    """Initialise weights, with noise on those that begin with equal values, where mistakes do not show."""
    stated = declarations(model)
    modules = dict(model.named_modules())

    def begins(name: str) -> bool:
        if not isinstance(stated[name].initial, Own):
            return True
        return callable(getattr(modules[name.rpartition(".")[0]], "reset_parameters", None))

    initialize(model, seed, among={name for name in stated if begins(name)}, state=state)
    for name, parameter in model.named_parameters():
        one, data = stated[name], local_data(parameter)
        if not begins(name):
            data.zero_()
        box = one.true_part(stored_box(parameter, one, state))
        flat = len(one.shape) < 2 or isinstance(one.initial, Constant) or not begins(name)
        if flat and box.size:
            noise = torch.zeros(box.shape, dtype=data.dtype)
            fill(noise, box, one.shape, Normal(0.3), seed_of(seed, "rough", name))
            data[: box.shape[0]].add_(noise) if box.shape else data.add_(noise)


def _held(model: nn.Module, state: ParallelState, choose: Callable[[nn.Parameter], Tensor | None]) -> Held:
    """Return what this rank stores, without padding."""
    stated, found = declarations(model), {}
    for name, parameter in model.named_parameters():
        chosen = choose(parameter)
        if chosen is not None:
            box = stated[name].true_part(stored_box(parameter, stated[name], state))
            data = local_data(chosen)
            found[name] = (box, (data[: box.shape[0]] if box.shape else data).clone())
    return found


def _count(batch: Mapping[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


def _spread(given: Any, samples: Samples) -> tuple[Tensor, int]:
    """Return a loss for a module that came without one; it weighs all elements of the output differently."""
    if not isinstance(given, Tensor):
        raise BadInput(
            "assert_layout_invariant",
            "loss",
            expected="a loss, for a module that gives more than a tensor",
            found=type(given).__name__,
        )
    weights = (
        torch.arange(given[0].numel(), device=given.device, dtype=given.dtype).cos().view(given[0].shape)
    )
    return (given * weights).sum() + given.square().sum() / 2, len(given)
