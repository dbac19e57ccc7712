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
    Declaration,
    Layout,
    Own,
    ParallelState,
    clip_gradients,
    declarations,
    initialize,
)
from ...parallel_state.engine import local_data
from ...ranks.pickling import FunctionName, unpack
from ...training.precision import Precision
from ...training.user_step import ModuleStep, Samples, own_samples
from ...training.zero_on_fsdp import shard_over_data, stacks_of_experts
from ..layouts import Observation, observe, roughen
from .recorder import Seen, Witness

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
    declared: dict[str, Declaration] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)
    run: Observation = field(default_factory=Observation)


def run_trial(
    trial: Trial, layout: Layout | None, expected: Shapes, read: str | None, write: str | None
) -> Witnessed:
    """Run the trial in a process group of the layout's ranks, or without a layout: with ``state=None`` and
    torch's own clipping.

    ``read``: a checkpoint to load at the end; ``write``: the place to write it again.
    """
    torch.set_default_dtype(trial.dtype)
    state = ParallelState.alone() if layout is None else ParallelState.start(layout)
    here = None if layout is None else state
    factory, loss, batch = trial.make()
    model = factory(state=here)
    found, witness = _witnessed(model, state), None
    if layout is not None:
        everywhere: list[Any] = [None] * layout.world
        misfit = bool(found.misfits) or any(expected.get(n) != shape for n, shape in found.shapes.items())
        dist.all_gather_object(everywhere, (misfit, set(found.shapes)))
        names = set().union(*(some for _, some in everywhere))
        if any(bad for bad, _ in everywhere) or names != set(expected):
            return found  # nothing that follows would say more
        first = state.data_index * (_count(batch) // layout.data // trial.micro_batch)
        # Experts that are dealt out are given other rows on each rank; what their mixture gives is compared.
        apart = stacks_of_experts(model) if layout.expert > 1 else []
        witness = Witness(model, first=first, partly=layout.pipeline > 1, apart=apart)
        shard_over_data(model, state, Precision(trial.dtype, trial.dtype, trial.dtype))
    watch = witness or Witness(model)
    _fill(model, trial.seed, state)
    step = ModuleStep(model, loss, micro_batch=trial.micro_batch, schedule=trial.schedule, state=here)

    def once(samples: Samples) -> Tensor:
        loss = step(samples)
        found.seen = watch.leave()  # of the first step only
        return loss

    def clip(model: nn.Module) -> Tensor:
        if layout is None:
            return nn.utils.clip_grad_norm_(model.parameters(), trial.clip)
        return clip_gradients(model, trial.clip, state=state)

    def keep(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if read is not None:
            load_module(read, model, optimizer, state=here)
        if write is not None:
            save_module(write, model, optimizer, step=trial.steps, state=here)

    batches = [own_samples(batch, state) if layout is not None else batch] * trial.steps
    found.run = observe(
        lambda: (model, once), batches, state, lr=trial.lr, clip=clip, strict=False, then=keep
    )
    return found


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
    own = [name for name in stated if not begins(name)]
    for name, parameter in model.named_parameters():
        if name in own:
            local_data(parameter).zero_()
    roughen(model, seed, state, also=own)


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
