"""Say what a model is for its checkpoints: a family of the zoo with its config, or a user's module."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..layers import Stage
from ..models import Family, Rule
from ..parallel_state import BadInput, Declaration, Layout, ParallelState, declarations, require
from ..parallel_state.collective_errors import together
from .user_module_family import Described, StoredModule, described_module


@dataclass(frozen=True)
class ModuleNames:
    """Hold a user's module's config.json and table of names, its name elsewhere, and how it is built."""

    config: Mapping[str, Any] = field(default_factory=dict)
    names: Sequence[Rule] = ()
    build: Callable[[ParallelState], nn.Module] | None = None


def describe_module(
    model: nn.Module,
    *,
    config: Mapping[str, Any] | None = None,
    names: Sequence[Rule] = (),
    build: Callable[[ParallelState], nn.Module] | None = None,
) -> None:
    """Leave with a user's module what its checkpoints say of it, for exports and for ``load`` of them.

    ``config``: the model's config.json, or any plain data to rebuild the module from. ``names``: the table of
    Hugging Face's names. ``build``: a function that makes the module for a state, as ``Model(state=state)``
    does; with it ``convert`` cuts the checkpoints into any number of stages. A model of the zoo needs none.
    """
    model.__dict__["family"] = ModuleNames(dict(config or {}), tuple(names), build)


def describe_build(
    model: nn.Module, config: Mapping[str, Any], build: Callable[[ParallelState], nn.Module] | None
) -> None:
    """Leave with a module how it is built, and ``config`` if nobody has described it."""
    described = getattr(model, "family", None)
    if not isinstance(described, ModuleNames):
        described = ModuleNames(dict(config))
    model.__dict__["family"] = replace(described, build=described.build or build)


def describe(model: nn.Module, state: ParallelState) -> Described:
    """Return what a model is for its checkpoints, by what ``Family.build`` or ``describe_module`` left there.

    Collective for a user's module. Raises ``BadInput`` for a table of names that does not fit.
    """
    family = getattr(model, "family", None)
    if isinstance(family, Family):
        return Described(family, model.config)
    marked = family if isinstance(family, ModuleNames) else ModuleNames()
    blocks = () if marked.build is None else _of_one_block(marked.build)
    stored = StoredModule.of(_gather_stages(model, state), marked.names, blocks)
    described = described_module(stored, marked.config)
    if marked.names:
        described.links()
    return described


def check_memory(model: nn.Module, where: str) -> None:
    """Refuse a model on the meta device, which can be neither filled nor saved; a rank looks for itself."""
    for name, parameter in model.named_parameters():
        expected, actual = "a parameter with memory", "one on the meta device"
        todo = 'Build the model with device="cpu", or call model.to_empty(device=...) before'
        require(parameter.device.type != "meta", where, name, expected, actual, todo)


def _of_one_block(build: Callable[[ParallelState], nn.Module]) -> list[dict[str, Declaration]]:
    """Return the declarations of each stage where a stage has one block; empty for a module without stages.

    It is built on the meta device, a block at a time.
    """
    with torch.device("meta"):
        stage = getattr(build(ParallelState.alone()), "stage", None)
        layout = Layout(pipeline=len(stage.blocks)) if isinstance(stage, Stage) else Layout()
        if layout.pipeline == 1:
            return []
        states = (ParallelState.stand_in(layout, rank) for rank in range(layout.world))
        return [declarations(build(state)) for state in states]


def _gather_stages(model: nn.Module, state: ParallelState) -> list[dict[str, Declaration]]:
    """Return the declarations of every pipeline stage, gathered from one rank of each. Collective.

    Raises ``BadInput`` for a parameter on two stages that is not declared so.
    """
    layout = state.layout

    def here() -> dict[str, Declaration]:
        return declarations(model) if state.rank == layout.first_rank(state.at.pipeline) else {}

    everywhere = together(here, state)
    stages = [everywhere[layout.first_rank(stage)] for stage in range(layout.pipeline)]
    first: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for name, declaration in stage.items():
            if first.setdefault(name, number) != number and not declaration.ends:
                actual = f"stages {first[name]} and {number}"
                todo = "Declare it with ends=True if both ends of the pipeline hold it"
                raise BadInput("model", name, expected="one stage", found=actual, todo=todo)
    return stages
