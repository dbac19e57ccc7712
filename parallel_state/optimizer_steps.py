"""Let the optimizers that step here update what this rank stores, and refuse what would silently give other
numbers than one process: updates that need whole parameters, hooks of parameters that no backward calls, and
a ``GradScaler`` whose ranks would skip different steps.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..system import counted
from ..system.errors import require
from .declaration import declarations
from .engine import is_dtensor, local_data
from .engine.autograd_and_compiler import has_hooks
from .engine.local_tensors import BY_TENSOR, keep_momentum, update_stored
from .foreign import MODELS, refuse_lost_hooks

#: Of torch's optimizers those whose update of an element depends on others: of its parameter, or of all.
_OF_WHOLE = (*BY_TENSOR, torch.optim.LBFGS)


def _before_step(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
    if not dist.is_initialized() or torch.compiler.is_compiling():
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(has_hooks(parameter, of_sums=True) for parameter in parameters):
        for model in [*MODELS]:
            refuse_lost_hooks(model, f"{type(optimizer).__name__}.step")
    if isinstance(optimizer, _OF_WHOLE):
        _refuse_parts(optimizer, parameters)
    _refuse_own_skips(optimizer, parameters)
    update_stored(optimizer)


def _refuse_parts(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse parameters that lie here otherwise than such an update needs them.

    Operators on DTensors join their pieces, as those of Muon do; for Adafactor torch lacks some. LBFGS makes
    one vector of all parameters.
    """
    of_all = isinstance(optimizer, torch.optim.LBFGS)
    by_pieces = isinstance(optimizer, torch.optim.Adafactor)
    names = {
        parameter: (name, declared[name].held_shape(state.layout), state.layout.pipeline)
        for model, state in MODELS.items()
        for declared in [declarations(model)]
        for name, parameter in model.named_parameters()
    }
    meshes = {parameter.device_mesh if is_dtensor(parameter) else None for parameter in parameters}
    kind = type(optimizer).__name__
    todo = f"{kind} updates an element by others too: take AdamW, say, or data ranks at zero=0"
    for number, parameter in enumerate(parameters):
        name, whole, stages = names.get(parameter, (f"parameter {number}", parameter.shape, 1))
        shape = local_data(parameter).shape if by_pieces else parameter.shape
        for refused, expected, actual in (
            (tuple(shape) != tuple(whole), f"all of {'x'.join(map(str, whole))}", "a piece"),
            (of_all and stages > 1, "all parameters of the model", f"those of one of {stages} stages"),
            (of_all and len(meshes) > 1, "all parameters on one mesh", f"{len(meshes)} meshes"),
        ):
            require(not refused, f"{kind}.step", name, expected, actual, todo)


def _refuse_own_skips(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse a ``GradScaler`` that skips a step by gradients of this rank alone.

    Operators on DTensors decide for all ranks of their mesh: stages, ranks with other experts, and those with
    other pieces in plain tensors remain.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    if frame is None or not (scaler := frame.f_locals["self"]).is_enabled():
        return
    plain, own = not all(map(is_dtensor, parameters)), {*parameters}
    for model, state in MODELS.items():
        layout = state.layout
        apart = layout.pipeline > 1 or layout.expert > 1 or (layout.tensor > 1 and plain)
        if apart and not own.isdisjoint(model.parameters()):
            fused = any(group.get("fused") for group in optimizer.param_groups)
            alone = fused or not hasattr(scaler, "process_group")
            shared_by = 1 if alone else dist.get_world_size(scaler.process_group)
            require(
                shared_by == layout.world, f"{type(optimizer).__name__}.step", type(scaler).__name__,
                f"a decision to skip of {counted(layout.world, 'rank')}",
                f"one of {counted(shared_by, 'rank')}",
                "Take torch's ShardedGradScaler and an optimizer with fused=False, or Update",
            )  # fmt: skip


def watch_steps(after: Callable[[], object]) -> None:
    """See to each step of an optimizer in this process, as this file says, and call ``after`` behind it."""

    def _after_step(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        keep_momentum(optimizer)
        after()

    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
