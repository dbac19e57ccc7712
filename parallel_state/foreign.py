"""Refuse torch's own wrappers (DDP, FSDP) where gradients that they average would be taken for sums, and
hooks of parameters that no backward would call.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList

from ..system import counted
from ..system.errors import BadInput
from .declaration import Declaration
from .engine import fsdp_modules, is_dtensor, is_sharded
from .engine.autograd_and_compiler import has_hooks
from .engine.fully_sharded import parameters_of, ranks_of
from .layout import Layout
from .state import ParallelState

#: The models of several ranks that were seen here, each with the state that it was cut with.
MODELS: MutableMapping[nn.Module, ParallelState] = WeakKeyDictionary()
_TODO = "Take shard_over_data(model, state, Precision()) instead: layout.zero=0 is DDP, 1 to 3 are ZeRO"


def mark_shared(model: nn.Module, state: ParallelState) -> None:
    """Note that ``shard_over_data`` has seen this model, and made its FSDP modules."""
    MODELS[model] = state
    for module in model.modules():
        if is_sharded(module):
            module.__dict__["shared_over_data"] = True


def check_state(model: nn.Module, state: ParallelState, where: str, *, averaged: bool = False) -> None:
    """Refuse a state other than the one that ``model`` was cut with; also call ``refuse_foreign``.

    For example, without a state each of several ranks would take its part of a weight for the whole weight.
    ``averaged``: torch's wrappers over ``state.data_mesh`` are right here.
    """
    if state.layout.world > 1:
        refuse_foreign(model, where, over=state if averaged else None)
        MODELS[model] = state
    for name, cut_for in _cut_otherwise(model, state):
        expected = "the ParallelState that the model was cut with"
        todo = f"Pass it: {where}(..., state=state)"
        actual = f"one of {state.layout}, and {name or 'the model'} is cut for {cut_for}"
        raise BadInput(where, "state", expected=expected, found=actual, todo=todo)
    refuse_lost_hooks(model, where)
    _refuse_added(model, where)
    refuse_replaced(model, state.layout, where)


def refuse_replaced(model: nn.Module, layout: Layout, where: str) -> None:
    """Refuse what a parametrization, or pruning, trains in the place of a parameter that is declared as cut,
    partial or of both ends: it is not declared, and would pass for whole on every rank. If it is declared,
    its norm would be that of a piece.
    """
    for path, module in model.named_modules():
        declared: Mapping[str, Declaration] = vars(module).get("declared", {})
        parametrized = isinstance(module, ParametrizationList)
        for leaf in declared.keys() - (() if parametrized else module._parameters.keys()):
            declaration = declared[leaf]
            over_tensor = layout.tensor > 1 and (declaration.cut or declaration.partial)
            over_pipeline = layout.pipeline > 1 and declaration.ends
            if over_tensor or over_pipeline or (layout.expert > 1 and declaration.experts):
                raise BadInput(
                    where,
                    f"{path}.{leaf}".strip("."),
                    expected="the parameter that is declared",
                    found="that of a parametrization" if parametrized else "none",
                    todo="A parametrization trains others: compute with it in forward instead",
                )


def _refuse_added(model: nn.Module, where: str) -> None:
    """Refuse parameters that the model got after ``shard_over_data``: their gradients are this rank's own."""
    shared = {p for module in model.modules() if "shared_over_data" in vars(module) for p in _inside(module)}
    for name, parameter in model.named_parameters() if shared else ():
        if parameter.requires_grad and parameter not in shared:
            expected = "a parameter that shard_over_data has seen, as others are"
            todo = "Add adapters and heads, and change parameters, before that call"
            raise BadInput(where, name, expected=expected, found="a later one", todo=todo)


def refuse_lost_hooks(model: nn.Module, where: str) -> None:
    """Refuse hooks of parameters that were set after ``shard_over_data``."""
    copied = "compute_weights" in vars(model)
    if copied or fsdp_modules(model):
        refuse_hooks(model, where, of_sums=copied)


def refuse_hooks(model: nn.Module, where: str, *, of_sums: bool = True) -> None:
    """Refuse a hook of a parameter in whose place another tensor is computed with, and gets the gradient.

    ``of_sums``: nor is what ``register_post_accumulate_grad_hook`` registers called.
    """
    for name, parameter in model.named_parameters():
        if has_hooks(parameter, of_sums=of_sums):
            expected, actual = "a parameter without hooks", "one whose hook no backward would call"
            todo = "Change .grad before the optimizer's step, or hook a module or an activation"
            raise BadInput(where, name, expected=expected, found=actual, todo=todo)


def _cut_otherwise(model: nn.Module, state: ParallelState) -> Iterator[tuple[str, str]]:
    """Yield the modules and parameters that are cut for another layout, and which."""
    for name, module in model.named_modules():
        own = getattr(module, "state", None)
        own = getattr(own, "around", None) or own
        if isinstance(own, ParallelState) and own.layout.world > 1 and own.layout != state.layout:
            yield name, str(own.layout)
    for name, parameter in model.named_parameters() if state.layout.world == 1 else ():
        if is_dtensor(parameter) and parameter.device_mesh.size() > 1:
            yield name, counted(parameter.device_mesh.size(), "rank")


def refuse_foreign(model: nn.Module, where: str, *, over: ParallelState | None = None) -> None:
    """Refuse a model that torch's ``fully_shard``, FSDP or DDP has wrapped directly, naming the module.

    ``over``: accept ``fully_shard`` and DDP over the ranks of this state's ``data_mesh``. Whoever averages
    there divides a loss by the tokens of this rank. Stacks of experts are held by fewer ranks, and DDP hides
    parameters that are cut over tensor ranks. A trained parameter outside of such a wrapper is refused.
    """
    averaged: set[nn.Parameter] = set()
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it is not imported, nothing is wrapped by it
    wrappers = (DistributedDataParallel, *((fsdp.FullyShardedDataParallel,) if fsdp else ()))
    for name, module in model.named_modules():
        wrapped = isinstance(module, wrappers)
        if not wrapped and (not is_sharded(module) or module.__dict__.get("shared_over_data")):
            continue
        expected = "a module that shard_over_data shares"
        wrapper = f"{type(module).__name__ if wrapped else 'fully_shard of torch'}, which averages gradients"
        meshes = _meshes(module)
        hides = over is not None and over.tensor.size > 1 and isinstance(module, DistributedDataParallel)
        if over is not None and over.layout.expert == 1 and meshes and not hides:
            right = tuple(sorted(over.data_mesh.mesh.flatten().tolist()))
            if meshes <= {right}:
                averaged.update(_inside(module))
                continue
            expected += f", or torch's wrapper over state.data_mesh, ranks {_listed(right)}"
            wrapper += f" over ranks {' and over '.join(_listed(ranks) for ranks in sorted(meshes))}"
        raise BadInput(where, name or "model", expected=expected, found=wrapper, todo=_TODO)
    outside = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter not in averaged
    ]
    if averaged and outside:
        expected = "all trained parameters in torch's wrapper, as others are"
        todo = "Its gradient would be that of this rank's tokens alone: wrap the whole model"
        raise BadInput(where, outside[0], expected=expected, found="one outside of it", todo=todo)


def _inside(module: nn.Module) -> Iterable[nn.Parameter]:
    """Return the parameters whose gradients a wrapper averages."""
    if is_sharded(module):
        return parameters_of(module)
    inner: nn.Module = module.get_submodule("module")
    ignored = getattr(module, "parameters_to_ignore", ())
    return [parameter for name, parameter in inner.named_parameters() if name not in ignored]


def _meshes(module: nn.Module) -> set[tuple[int, ...]]:
    """Return the ranks over which DDP or ``fully_shard`` averages; empty for the FSDP before ``fully_shard``,
    whose flat parameters are not those that were declared.
    """
    if is_sharded(module):
        return ranks_of(module)
    if isinstance(module, DistributedDataParallel):
        return {tuple(sorted(dist.get_process_group_ranks(module.process_group)))}
    return set()


def _listed(ranks: Sequence[int]) -> str:
    """Name ranks in a line; of many, the first and the last."""
    shown = [*ranks] if len(ranks) <= 8 else [*ranks[:3], "...", ranks[-1]]
    return ", ".join(map(str, shown))
