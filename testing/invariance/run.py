"""Run a user's module in one layout: take some steps, record everything seen, save and load a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...checkpoints import load, save
from ...layers import stacks_of_experts
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
from ...ranks.messages import FunctionName, unpack
from ...training.precision import Precision
from ...training.samples import Samples, shard_batch
from ...training.step import Step
from ...training.zero_on_fsdp import shard_over_data
from ..layouts import Observation, observe, roughen
from ..recorder import Recorder, Seen

DTYPE = torch.float64
Declared = Mapping[str, Declaration]


@dataclass(frozen=True)
class Trial:
    """State what every rank has to do; without a ``schedule`` it is the plainest for the layout's stages.

    ``arguments``: those for the factory, the batch, and a loss that is no function, packed. ``nudged``: each
    weight is the next number, up or down.
    """

    factory: FunctionName
    loss: FunctionName | None
    arguments: bytes
    micro_batch: int
    steps: int
    clip: float
    lr: float
    seed: int
    schedule: str | None
    nudged: bool = False

    def make(self) -> tuple[Callable[..., nn.Module], Callable[..., Any], Samples]:
        """Make the factory, the loss and the batch in this process.

        The user's file is loaded first: its classes may be among the arguments.
        """
        factory = self.factory.load()
        named = _spread if self.loss is None else self.loss.load()
        args, keywords, batch, loss = unpack(self.arguments)
        wide = {n: x.to(DTYPE) if x.is_floating_point() else x for n, x in batch.items()}
        return partial(factory, *args, **keywords), loss or named, wide


@dataclass
class Witnessed:
    """Hold what was seen on one rank. ``misfits``: by parameter, how it is not what it should be."""

    declared: dict[str, Declaration]
    misfits: dict[str, str]
    seen: Seen = field(default_factory=Seen)
    run: Observation = field(default_factory=Observation)


def run_trial(
    trial: Trial, layout: Layout | None, expected: Declared, read: str | None, write: str | None
) -> Witnessed:
    """Run the trial in a process group of the layout's ranks, or without a layout: with ``state=None`` and
    torch's own clipping.

    ``expected``: one process's declarations. ``read``: a checkpoint to load at the end; ``write``: the place
    to write it again.
    """
    torch.set_default_dtype(DTYPE)
    state = ParallelState.alone() if layout is None else ParallelState.start(layout)
    trial_state = None if layout is None else state
    factory, loss, batch = trial.make()
    model = factory(state=trial_state)
    witnessed = Witnessed(declarations(model), {} if layout is None else _misfits(model, state, expected))
    if layout is not None:
        everywhere: list[Any] = [None] * layout.world
        dist.all_gather_object(everywhere, (bool(witnessed.misfits), set(witnessed.declared)))
        misfits, declared = zip(*everywhere, strict=True)
        if any(misfits) or set().union(*declared) != set(expected):
            return witnessed  # nothing that follows would say more
    # Experts that are dealt out are given other rows on each rank; what their mixture gives is compared.
    apart = stacks_of_experts(model, state.layout)
    unwatched = {within for experts in apart for within in experts.modules()}
    watched = {name for name, module in model.named_modules() if module not in unwatched}
    count = len(next(iter(batch.values()))) // state.layout.data // trial.micro_batch
    recorder = Recorder(model, watched, first=state.data_index * count)
    if layout is not None:
        shard_over_data(model, state, Precision(DTYPE, DTYPE, DTYPE))
    _fill(model, trial.seed, state)
    if trial.nudged:
        _nudge(model, trial.seed)
    stages = state.layout
    schedule = "zbv" if stages.v_shape else "interleaved" if stages.virtual_stages > 1 else "1f1b"
    schedule = trial.schedule or schedule
    step = Step(model, loss, micro_batch=trial.micro_batch, schedule=schedule, state=trial_state)

    def once(samples: Samples) -> Tensor:
        result = step.launch(samples)
        step.refuse(result, alike=False)  # the verdict names the module
        witnessed.seen = recorder.leave()  # of the first step only
        return result.loss

    def clip(model: nn.Module) -> Tensor:
        if layout is None:
            return nn.utils.clip_grad_norm_(model.parameters(), trial.clip)
        return clip_gradients(model, trial.clip, state=state)

    def keep(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if read is not None:
            load(read, model, optimizer, state=trial_state)
        if write is not None:
            save(write, model, optimizer, step=trial.steps, state=trial_state)

    batches = [batch if layout is None else shard_batch(batch, state)] * trial.steps
    witnessed.run = observe(
        lambda: (model, once), batches, state, lr=trial.lr, clip=clip, strict=False, then=keep
    )
    return witnessed


def _misfits(model: nn.Module, state: ParallelState, expected: Declared) -> dict[str, str]:
    """Return, by name, how a parameter is held otherwise than declared, or declared otherwise than on one
    process.
    """
    declared, misfits = declarations(model), {}
    for name, parameter in model.named_parameters():
        promised, holds = declared[name].box(state.layout, state.at).shape, tuple(local_data(parameter).shape)
        shape_here, shape = declared[name].shape, expected[name].shape if name in expected else None
        if promised != holds:
            misfits[name] = f"{name} is declared so that a rank holds {promised}, and it holds {holds}"
        elif shape is None:
            misfits[name] = f"{name} is not there on one process"
        elif shape_here != shape:
            misfits[name] = f"{name} is {shape_here}, and {shape} on one process"
            path, _, leaf = name.rpartition(".")
            if leaf not in model.get_submodule(path).__dict__.get("declared", {}):
                dim = next((d for d, (a, b) in enumerate(zip(shape_here, shape, strict=False)) if a != b), 0)
                misfits[name] += (
                    ", and nobody declared it: a parameter that is cut says so, by "
                    f"declare(module, name, cut=Cut({dim}), state=state) or when declare_parameter makes it; "
                    "parallel layers do it by themselves"
                )
    return misfits


def _fill(model: nn.Module, seed: int, state: ParallelState) -> None:
    """Initialise weights, with noise on those that begin with equal values, where mistakes do not show."""
    declared = declarations(model)
    own = {
        name
        for name, declaration in declared.items()
        if isinstance(declaration.initial, Own)
        and not callable(getattr(model.get_submodule(name.rpartition(".")[0]), "reset_parameters", None))
    }
    initialize(model, seed, among=declared.keys() - own, state=state)
    for name in own:
        local_data(model.get_parameter(name)).zero_()
    roughen(model, seed, state, also=own)


@torch.no_grad()
def _nudge(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            parameter.copy_(parameter.nextafter(torch.where(up, torch.inf, -torch.inf)))


def _spread(output: Any, samples: Samples) -> tuple[Tensor, int]:
    """Return a loss for a module that came without one; it weighs all elements of the output differently."""
    if not isinstance(output, Tensor):
        expected, kind = "a loss, for a module that gives more than a tensor", type(output).__name__
        raise BadInput("assert_layout_invariant", "loss", expected=expected, found=kind)
    places = torch.arange(output[0].numel(), device=output.device, dtype=output.dtype)
    return (output * places.cos().view(output[0].shape)).sum() + output.square().sum() / 2, len(output)
