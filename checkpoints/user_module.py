"""Save and load checkpoints of any module: by its declarations, in any layout; a table of names exports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models import Rule
from ..parallel_state import (
    BadCheckpoint,
    BadInput,
    Declaration,
    Layout,
    ParallelState,
    alone_or,
    buffer_names,
    check_state,
    declarations,
)
from ..parallel_state.collective_errors import together
from .load import fill
from .moments import begin_moments, together_updates
from .rank_storage import stored_parts
from .resume import Progress, check_same_dtype, load_together, newest_in, restore_progress
from .save import Contents, Saver
from .source import Source, read_source
from .user_module_family import ModuleConfig, ModuleFamily, StoredModule, module_family
from .verify_together import verify_share


def save_module(
    root: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    data: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    names: Sequence[Rule] = (),
    keep: int = 2,
    state: ParallelState | None = None,
) -> Path:
    """Write ``root/step-N`` from what the ranks hold of any module, and delete older than ``keep``.

    Collective; returns the checkpoint's folder. With an ``optimizer`` (AdamW) both moments are in it, and a
    run goes on bit for bit. ``data``: plain data that ``load_module`` gives back, such as where the data
    stood. ``config`` and ``names`` are for exports: the model's config.json, and the table of Hugging Face's
    names; ``config`` may also be any plain data to rebuild the module from. Nothing is committed unless every
    rank succeeds.
    """
    state = alone_or(state)
    check_state(model, state, "save_module")
    contents = module_contents(model, optimizer, config=config, names=names, state=state)
    if optimizer is not None:
        begin_moments(model, optimizer)
    memory = together_updates(model, optimizer, state)
    with Saver(Path(root), model, optimizer, contents, keep=keep, state=state) as saver:
        saver.save(Progress(step, state.layout, dict(data or {}), memory))
    return Path(root) / f"step-{step:08d}"


def module_contents(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    config: Mapping[str, Any] | None = None,
    names: Sequence[Rule] = (),
    state: ParallelState,
) -> Contents:
    """Return what the checkpoints of a module have in common, for your own ``Saver``. Collective.

    Raises ``BadInput`` for what a checkpoint cannot hold: persistent buffers, an optimizer other than AdamW.
    """
    config = dict(config or {})
    family = module_family(StoredModule.of(gather_stages(model, state), names), config)
    if names:
        family.links(ModuleConfig())  # refuses a table that does not fit

    def frozen_here() -> list[str]:
        check_storable("save_module", model, optimizer)
        return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]

    everywhere = together(frozen_here, world=state.layout.world, group=state.file_group)
    frozen = frozenset(name for names_there in everywhere for name in names_there)
    return Contents(family, ModuleConfig(), config, frozen=frozen)


def check_storable(where: str, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse what a checkpoint could not hold: other optimizers, persistent buffers, several dtypes."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        found = type(optimizer).__name__
        raise BadInput(where, "optimizer", expected="AdamW, whose moments are known", found=found)
    if optimizer is not None and any(group.get("amsgrad") for group in optimizer.param_groups):
        expected, found = "false: a checkpoint has no place for the largest second moment", "true"
        raise BadInput(where, "optimizer.amsgrad", expected=expected, found=found)
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in model.state_dict():
        if name not in known:
            todo = "register_buffer(..., persistent=False), or a declared parameter without gradient"
            raise BadInput(where, name, expected="parameters alone", found="a persistent buffer", todo=todo)
    fixed = buffer_names(declarations(model))
    dtypes = {str(one.dtype) for name, one in model.named_parameters() if name not in fixed}
    if len(dtypes) > 1:
        found = " and ".join(sorted(dtypes))
        raise BadInput(where, "dtype", expected="one for all parameters", found=found)


def gather_stages(model: nn.Module, state: ParallelState) -> list[dict[str, Declaration]]:
    """Return the declarations of every pipeline stage, gathered from one rank of each. Collective.

    Raises ``BadInput`` for a parameter on two stages that is not declared so.
    """
    layout = state.layout

    def here() -> dict[str, Declaration]:
        return declarations(model) if state.rank == layout.first_rank(state.at.pipeline) else {}

    everywhere = together(here, world=layout.world, group=state.file_group)
    stages = [everywhere[layout.first_rank(stage)] for stage in range(layout.pipeline)]
    first: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for name, declaration in stage.items():
            if first.setdefault(name, number) != number and not declaration.ends:
                raise BadInput(
                    "model", name, expected="one stage", found=f"stages {first[name]} and {number}",
                    todo="Declare it with ends=True if both ends of the pipeline hold it",
                )  # fmt: skip
    return stages


def load_module(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    names: Sequence[Rule] = (),
    state: ParallelState | None = None,
) -> Progress:
    """Fill a module and, if given, its optimizer from a checkpoint that any layout wrote. Collective.

    ``path``: a checkpoint, the folder of several (the newest is taken), or with ``names`` a Hugging Face
    folder, which has weights alone. The module may be cut, sharded by FSDP, a stage. Raises ``BadCheckpoint``
    or ``BadInput``, the same on every rank, for a checkpoint of another module, naming the first parameter.
    """
    state = alone_or(state)
    check_state(model, state, "load_module")
    stages = gather_stages(model, state)

    def load(path: str) -> Progress:
        family = module_family(StoredModule.of(stages, names), {})
        source = read_source(path, module=family, whole=state.rank == 0)
        _check_same(source, stages, family)
        manifest, links = source.manifest, source.links()
        if optimizer is not None:
            check_same_dtype(source, model)
        if manifest is not None:
            verify_share(source, manifest, state)
        for name, tensor, box in stored_parts(model, state):
            fill(tensor, source.read(name, box, links))
        if manifest is None:
            return Progress(0, Layout())
        if optimizer is not None and manifest.kind != "training":
            todo = "Leave the optimizer out to begin anew from these weights"
            raise BadCheckpoint(source.path, expected="moments", found="weights alone", todo=todo)
        return restore_progress(source, manifest, model, optimizer, state)

    with newest_in(path, state) as found:
        return load_together(lambda: load(found), state)


def _check_same(source: Source, stages: Sequence[Mapping[str, Declaration]], family: ModuleFamily) -> None:
    """Check the names and true shapes of the whole module against those of the checkpoint."""
    wanted = {name: one.shape for stage in stages for name, one in stage.items()}
    if source.manifest is None:
        return  # the folder was read against them
    found = {n: whole.shape for n, whole in source.catalog.items() if not n.startswith("optimizer.")}
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            expected, there = (
                "no such parameter" if one is None else list(one)
                for one in (wanted.get(name), found.get(name))
            )
            todo = "It is a checkpoint of another module"
            raise BadCheckpoint(source.path, name, expected=expected, found=there, todo=todo)
