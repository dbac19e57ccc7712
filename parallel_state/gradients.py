"""Finish gradients after backward: sum the partial ones, measure the global norm, clip."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import engine
from .declaration import Declaration, buffer_names, declarations
from .engine import local_data
from .foreign import check_state
from .state import ParallelState, alone_or


class Gradients:
    """Finish a model's gradients after each backward: sum partial ones, measure the norm, clip.

    The parameters and their declarations are looked up once. So make this object after ``shard_over_data``,
    when the model's parameters are the same objects as the optimizer's. ``where`` names the caller in an
    error. No method makes the host wait for the device.
    """

    def __init__(
        self, model: nn.Module, state: ParallelState | None = None, *, where: str = "Gradients"
    ) -> None:
        self.state = state = alone_or(state)
        check_state(model, state, where)
        stated = declarations(model)
        self._all = [(name, parameter, stated[name]) for name, parameter in model.named_parameters()]
        self._owned = {name: one.owner(state.layout, state.at) for name, _, one in self._all}
        fixed = buffer_names(stated)
        inner = {promoted(parameter.dtype) for name, parameter, _ in self._all if name not in fixed}
        self._dtype = inner.pop() if len(inner) == 1 else torch.float32
        # The gradients' device (the host if they are offloaded), so that all ranks sum on the same kind.
        self.device = next((parameter.device for _, parameter, _ in self._all), state.device)
        self._counts: tuple[tuple[bool, ...], Tensor] | None = None

    def finalize(self, *, reduce: torch.dtype | None = None) -> None:
        """Sum the partial gradients, in place; see ``finalize_gradients``."""
        state = self.state
        if state.tensor_size > 1:
            partial = [one for _, one, declaration in self._all if "tensor" in declaration.partial]
            _sum_together(partial, state.tensor_group, reduce)
        if state.layout.pipeline > 1 and not state.layout.v_shape:  # in a V one rank holds both ends
            _sum_together([one for _, one, stated in self._all if stated.ends], state.ends_group, reduce)

    def norm(self) -> Tensor:
        """Return the global 2-norm of the gradients; see ``gradient_norm``."""
        found = [(name, grad) for name, grad in self._present() if grad.numel()]
        total = torch.zeros((), dtype=self._dtype, device=self.device)
        if found:
            grads = [grad for _, grad in found]
            dtype = promoted(*{grad.dtype for grad in grads})
            squares = torch.stack(engine.foreach_norm(grads, dtype)) ** 2
            owned = tuple(self._owned[name] for name, _ in found)
            total = (squares if all(owned) else squares * self._mask(owned, squares)).sum()
        if self.state.layout.world > 1:
            dist.all_reduce(total)
        return total.sqrt()

    def clip(self, max_norm: float, *, loss_scale: float = 1.0) -> Tensor:
        """Clip the gradients, in place, and return their norm before; see ``clip_gradients``."""
        norm = self.norm() / loss_scale
        if max_norm == 0 and loss_scale == 1.0:
            return norm
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        scale = torch.where(norm.isfinite(), scale / loss_scale, 1.0)
        grads = [grad for _, grad in self._present()]
        for dtype in {grad.dtype for grad in grads}:
            engine.foreach_mul_([grad for grad in grads if grad.dtype == dtype], scale.to(dtype))
        return norm

    def count(self, *, unused: Callable[[str], Any] = lambda name: False) -> tuple[int, int]:
        """Return two counts of this rank: its trained parameters, and how many of them have no gradient.

        ``unused`` tells from a parameter's name whether a step may leave it without a gradient; such
        parameters are not counted.
        """
        trained = [one for name, one, _ in self._all if one.requires_grad and not unused(name)]
        return len(trained), sum(one.grad is None for one in trained)

    def _present(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, local_data(one.grad)) for name, one, _ in self._all if one.grad is not None)

    def _mask(self, owned: tuple[bool, ...], like: Tensor) -> Tensor:
        """Return 1 for each gradient that counts here and 0 for a copy, on the device."""
        if self._counts is None or self._counts[0] != owned or self._counts[1].dtype != like.dtype:
            mask = torch.tensor(owned, dtype=like.dtype).to(like.device, non_blocking=True)
            self._counts = owned, mask
        return self._counts[1]


def finalize_gradients(
    model: nn.Module, *, reduce: torch.dtype | None = None, state: ParallelState | None = None
) -> None:
    """Sum the partial gradients, in place; call it once in a step after the last backward.

    Norm weights and row biases with sequence parallelism, and shared key/value heads, are summed over the
    tensor axis; a tied embedding is summed over the two ends of the pipeline. FSDP has already summed over
    the data axes. ``reduce``: the dtype to sum in; the default is that of the gradients.
    """
    Gradients(model, state, where="finalize_gradients").finalize(reduce=reduce)


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
    return Gradients(model, state, where="gradient_norm").norm()


def clip_gradients(
    model: nn.Module, max_norm: float, *, loss_scale: float = 1.0, state: ParallelState | None = None
) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before.

    ``max_norm=0`` does not clip. ``loss_scale``: the factor of the loss; gradients and norm are divided by
    it. If the norm is not finite, the gradients stay as they are, so that the cause can be found. Collective
    over all ranks.
    """
    return Gradients(model, state, where="clip_gradients").clip(max_norm, loss_scale=loss_scale)


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


def promoted(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of these dtypes are added up: at least fp32."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def _gradients(model: nn.Module) -> Iterable[tuple[str, Declaration, Tensor]]:
    stated = declarations(model)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, stated[name], local_data(parameter.grad)


def _sum_together(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, reduce: torch.dtype | None
) -> None:
    """All-reduce the gradients of many small parameters as one tensor, for each dtype.

    A trained parameter without a gradient counts as zeros: the ranks need not have the same gradients to send
    the same number of bytes.
    """
    taking = [one for one in parameters if one.requires_grad or one.grad is not None]
    for dtype in sorted({one.dtype for one in taking}, key=str):
        same = [one for one in taking if one.dtype == dtype]
        grads = [local_data(torch.zeros_like(one) if one.grad is None else one.grad) for one in same]
        flat = torch.cat([grad.reshape(-1) for grad in grads]).to(reduce or dtype)
        dist.all_reduce(flat, group=group)
        parts = flat.split([grad.numel() for grad in grads])
        summed = [part.view_as(grad) for grad, part in zip(grads, parts, strict=True)]
        engine.foreach_copy_(grads, summed)
