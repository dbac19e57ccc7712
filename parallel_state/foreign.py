"""Refuse torch's own wrappers (DDP, FSDP) around a parallel module: they average gradients, trilith sums
them.
"""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .engine import is_dtensor, is_sharded
from .errors import BadInput
from .state import ParallelState

_TODO = "Take shard_over_data(model, state, Precision()) instead: layout.zero=0 is DDP, 1 to 3 are ZeRO"


def mark_shared(model: nn.Module) -> None:
    """Note that ``shard_over_data`` made the FSDP modules of this model."""
    for module in model.modules():
        if is_sharded(module):
            module.__dict__["shared_over_data"] = True


def check_state(model: nn.Module, state: ParallelState, where: str) -> None:
    """Refuse a state other than the one that ``model`` was cut with; also call ``refuse_foreign``.

    For example, without a state each of several ranks would take its part of a weight for the whole weight.
    """
    if state.layout.world > 1:
        refuse_foreign(model, where)
    for name, module in model.named_modules():
        theirs = getattr(module, "state", None)
        if isinstance(theirs, ParallelState) and theirs.layout.world > 1 and theirs.layout != state.layout:
            _refuse_state(where, name, str(theirs.layout), state)
    if state.layout.world == 1:
        for name, one in model.named_parameters():
            if is_dtensor(one) and one.device_mesh.size() > 1:
                _refuse_state(where, name, f"{one.device_mesh.size()} ranks", state)


def _refuse_state(where: str, name: str, found: str, state: ParallelState) -> None:
    raise BadInput(
        where,
        "state",
        expected="the ParallelState that the model was cut with",
        found=f"one of {state.layout}, and {name or 'the model'} is cut for {found}",
        todo=f"Pass it: {where}(..., state=state)",
    )


def refuse_foreign(model: nn.Module, where: str) -> None:
    """Refuse a model that torch's ``fully_shard``, FSDP or DDP has wrapped directly, naming the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it is not imported, nothing is wrapped by it
    wrappers = (DistributedDataParallel, *((fsdp.FullyShardedDataParallel,) if fsdp else ()))
    for name, module in model.named_modules():
        found = None
        if isinstance(module, wrappers):
            found = f"{type(module).__name__}, which averages gradients over all ranks"
        elif is_sharded(module) and not module.__dict__.get("shared_over_data"):
            found = "torch's fully_shard with a mesh of its own, which averages gradients"
        if found is not None:
            raise BadInput(
                where,
                name or "model",
                expected="a module that shard_over_data shares",
                found=found,
                todo=_TODO,
            )
