"""Clip gradients to a largest global norm, in which every element of the whole model counts once."""

import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .declaration import buffer_names, declarations
from .engine.local_tensors import foreach_mul_, foreach_norm, real_data
from .foreign import check_state
from .state import ParallelState, alone_or


class GradientClipping:
    """Measure and clip the global norm of a model's gradients, step after step.

    The parameters and their declarations are looked up once. So make this object after ``shard_over_data``,
    when the model's parameters are the same objects as the optimizer's. ``where`` names the caller in an
    error. No method makes the host wait for the device.
    """

    def __init__(
        self, model: nn.Module, state: ParallelState | None = None, *, where: str = "GradientClipping"
    ) -> None:
        self.state = state = alone_or(state)
        check_state(model, state, where)
        declared, parameters = declarations(model), [*model.named_parameters()]
        self._parameters = parameters
        self._owned = {name: declared[name].owner(state.layout, state.at) for name, _ in parameters}
        fixed = buffer_names(declared)
        trained = (parameter for name, parameter in parameters if name not in fixed)
        self._dtype = promoted(*(parameter.dtype.to_real() for parameter in trained))
        # The gradients' device (the host if they are offloaded), so that all ranks sum on the same kind.
        self._device = next((parameter.device for _, parameter in parameters), state.device)
        self._counts: tuple[tuple[bool, ...], Tensor] | None = None

    def norm(self) -> Tensor:
        """Return the global 2-norm of the gradients; see ``gradient_norm``."""
        named_grads = [(name, grad) for name, grad in self._present() if grad.numel()]
        total = torch.zeros((), dtype=self._dtype, device=self._device)
        if named_grads:
            grads = [grad for _, grad in named_grads]
            squares = torch.stack(foreach_norm(grads, self._dtype)) ** 2
            owned = tuple(self._owned[name] for name, _ in named_grads)
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
            foreach_mul_([grad for grad in grads if grad.dtype == dtype], scale.to(dtype))
        return norm

    def _present(self) -> Iterator[tuple[str, Tensor]]:
        return (
            (name, real_data(parameter.grad))
            for name, parameter in self._parameters
            if parameter.grad is not None
        )

    def _mask(self, owned: tuple[bool, ...], like: Tensor) -> Tensor:
        """Return 1 for each gradient that counts here and 0 for a copy, on the device."""
        if self._counts is None or self._counts[0] != owned or self._counts[1].dtype != like.dtype:
            mask = torch.tensor(owned, dtype=like.dtype).to(like.device, non_blocking=True)
            self._counts = owned, mask
        return self._counts[1]


def gradient_norm(model: nn.Module, *, state: ParallelState | None = None) -> Tensor:
    """Return the 2-norm of the whole model's gradients, every element once; equal on all ranks.

    The result is a scalar tensor in at least fp32. Copies of a gradient count zero times, but a value in them
    that is not finite makes the norm NaN: all ranks know of an overflow anywhere. Collective over all.
    """
    return GradientClipping(model, state, where="gradient_norm").norm()


def clip_gradients(
    model: nn.Module, max_norm: float, *, loss_scale: float = 1.0, state: ParallelState | None = None
) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; return the norm before.

    ``max_norm=0`` does not clip. ``loss_scale``: the factor of the loss; gradients and norm are divided by
    it. If the norm is not finite, gradients stay, so that the cause can be found. Collective over all ranks.
    """
    return GradientClipping(model, state, where="clip_gradients").clip(max_norm, loss_scale=loss_scale)


def promoted(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of these dtypes are added up: at least fp32."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)
