"""Finish gradients after backward: sum the partial ones, measure the global norm, clip."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .declaration import Declaration, buffer_names, declarations
from .engine import local_data
from .foreign import check_state
from .state import ParallelState, alone_or


def finalize_gradients(
    model: nn.Module, *, reduce: torch.dtype | None = None, state: ParallelState | None = None
) -> None:
    """Sum the partial gradients, in place; call it once in a step after the last backward.

    Norm weights and row biases with sequence parallelism, and shared key/value heads, are summed over the
    tensor axis; a tied embedding is summed over the two ends of the pipeline. FSDP has already summed over
    the data axes. ``reduce``: the dtype to sum in; the default is that of the gradients.
    """
    state = alone_or(state)
    check_state(model, state, "finalize_gradients")
    if state.layout.world == 1:
        return
    found = list(_gradients(model))
    if state.tensor_size > 1:
        partial = [grad for _, declaration, grad in found if "tensor" in declaration.partial]
        _sum_together(partial, state.tensor_group, reduce)
    two_ends = state.layout.pipeline > 1 and not state.layout.v_shape  # in a V one rank holds both
    if two_ends and any(declaration.ends for _, declaration, _ in found):
        _sum_together([grad for _, declaration, grad in found if declaration.ends], state.ends_group, reduce)


def divide_gradients(model: nn.Module, by: Tensor) -> None:
    """Divide all gradients by one number, in place, on the host if they are kept there (offload)."""
    found = [local_data(one.grad) for one in model.parameters() if one.grad is not None]
    on = {device: by.to(device) for device in {grad.device for grad in found}}
    for grad in found:
        grad.div_(on[grad.device])


def gradient_norm(model: nn.Module, *, state: ParallelState | None = None) -> Tensor:
    """Return the 2-norm over the gradients of the whole model, with every element counted once; equal on all
    ranks.

    The result is a scalar tensor in at least fp32. Copies of a gradient count zero times, but a value in them
    that is not finite makes the norm NaN, so that all ranks know of an overflow anywhere. Collective over all
    ranks.
    """
    state = alone_or(state)
    check_state(model, state, "gradient_norm")
    squares = [
        torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)) ** 2
        * int(declaration.owner(state.layout, state.at))
        for _, declaration, grad in _gradients(model)
        if grad.numel()
    ]
    dtype = squares[0].dtype if squares else _norm_dtype(model)
    # The gradients' device (the host if they are offloaded), so that all ranks sum on the same kind.
    device = next((p.device for p in model.parameters()), state.device)
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=dtype, device=device)
    if state.layout.world > 1:
        dist.all_reduce(total)
    return total.sqrt()


def clip_gradients(
    model: nn.Module, max_norm: float, *, loss_scale: float = 1.0, state: ParallelState | None = None
) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before.

    ``max_norm=0`` does not clip. ``loss_scale``: the factor of the loss; gradients and norm are divided by
    it. If the norm is not finite, the gradients stay as they are, so that the cause can be found. Collective
    over all ranks.
    """
    norm = gradient_norm(model, state=state) / loss_scale
    if max_norm == 0 and loss_scale == 1.0:
        return norm
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    scale = torch.where(norm.isfinite(), scale / loss_scale, 1.0)
    for _, _, grad in _gradients(model):
        grad.mul_(scale.to(grad.dtype))
    return norm


def last_not_finite(model: nn.Module, *, state: ParallelState | None = None) -> str | None:
    """Return the last parameter on this rank (the first in a backward pass) whose gradient holds a NaN or an
    infinity.

    For a tied embedding this is the first stage's copy, because the last stage's copy holds the sum.
    """
    stage = 0 if state is None else state.at.pipeline
    found = [
        name
        for name, declaration, grad in _gradients(model)
        if not (declaration.ends and stage) and not bool(torch.isfinite(grad).all())
    ]
    return found[-1] if found else None


def _norm_dtype(model: nn.Module) -> torch.dtype:
    fixed = buffer_names(declarations(model))
    found = (parameter.dtype for name, parameter in model.named_parameters() if name not in fixed)
    dtypes = {torch.promote_types(dtype, torch.float32) for dtype in found}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _gradients(model: nn.Module) -> Iterable[tuple[str, Declaration, Tensor]]:
    stated = declarations(model)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, stated[name], local_data(parameter.grad)


def _sum_together(grads: list[Tensor], group: dist.ProcessGroup, reduce: torch.dtype | None) -> None:
    """All-reduce many small tensors as one, for each dtype."""
    for dtype in sorted({grad.dtype for grad in grads}, key=str):
        same = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in same]).to(reduce or dtype)
        dist.all_reduce(flat, group=group)
        for grad, part in zip(same, flat.split([grad.numel() for grad in same]), strict=True):
            grad.copy_(part.view_as(grad))
