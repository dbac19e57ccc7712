"""Wrappers of torch's around a module that is cut here: they average gradients that this library sums."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from .errors import BadInput

_TODO = "Take shard_over_data(model, state, Precision()) instead: layout.zero=0 is DDP, 1 to 3 are ZeRO"


def mark_shared(model: nn.Module) -> None:
    """Note that ``shard_over_data`` made the FSDP modules of this model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.__dict__["shared_over_data"] = True


def refuse_foreign(model: nn.Module, where: str) -> None:
    """Refuse a model that torch's ``fully_shard`` or DDP has wrapped directly, naming the module."""
    for name, module in model.named_modules():
        found = None
        if isinstance(module, DistributedDataParallel):
            found = "DistributedDataParallel, which averages gradients over all ranks"
        elif isinstance(module, FSDPModule) and not module.__dict__.get("shared_over_data"):
            found = "torch's fully_shard with a mesh of its own, which averages gradients"
        if found is not None:
            raise BadInput(
                where,
                name or "model",
                expected="a module that shard_over_data shares",
                found=found,
                todo=_TODO,
            )
