"""Reach the tensors that this rank stores, in a DTensor or in a nest, and change many of them at once."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .accelerator import is_host

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

#: Elements that are cast at once: they stay in a core's cache.
_PIECE = 1 << 18
_LIKELY = (Tensor, list, tuple, dict)


def is_dtensor(x: Tensor) -> "TypeIs[DTensor]":
    """Tell whether ``x`` is a DTensor. Those are imported late: their import takes half a second."""
    if type(x) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def local_data(x: Tensor) -> Tensor:
    """Return what this rank stores of ``x``, sharing memory and outside autograd."""
    local = x._local_tensor if is_dtensor(x) else x
    return local.detach() if local.requires_grad else local


def real_data(x: Tensor) -> Tensor:
    """Return what this rank stores of ``x``, sharing memory: of complex numbers, pairs of real ones."""
    local = local_data(x)
    return torch.view_as_real(local) if local.is_complex() else local


_OPTIM = torch.optim
#: Torch's optimizers that update each element by itself, and those whose update depends on other elements.
BY_ELEMENT = {
    _OPTIM.Adadelta, _OPTIM.Adagrad, _OPTIM.Adam, _OPTIM.AdamW, _OPTIM.Adamax, _OPTIM.ASGD, _OPTIM.NAdam,
    _OPTIM.RAdam, _OPTIM.RMSprop, _OPTIM.Rprop, _OPTIM.SGD,
}  # fmt: skip
BY_TENSOR = {_OPTIM.Adafactor, _OPTIM.Muon}


def update_stored(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of torch's compute with what this rank stores of each DTensor, if that is all of it,
    or if each element is updated by itself.

    For DTensors, torch's dispatch would plan for milliseconds how to cut each new shape; it takes no plain
    tensors beside them and no two meshes in one call, and lacks some operators.
    """
    kind: Any = type(optimizer)
    optimizer_ref = weakref.ref(optimizer)  # a circle would keep the moments
    if kind not in BY_ELEMENT | BY_TENSOR or "_init_group" in vars(optimizer):
        return

    def _init_group(
        group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor], *moments: list[Any]
    ) -> Any:
        if not group.get("differentiable"):  # before it, since Muon's moments lie as their gradients do
            for parameter in group["params"]:
                _cut_gradient(parameter)
        answer = kind._init_group(optimizer_ref(), group, parameters, grads, *moments)
        if not group.get("differentiable"):
            for tensors in (parameters, grads, *moments):
                tensors[:] = [_stored(x, kind in BY_ELEMENT) if isinstance(x, Tensor) else x for x in tensors]
        return answer

    vars(optimizer)["_init_group"] = _init_group


def _cut_gradient(parameter: Tensor) -> None:
    """Cut a gradient as its parameter is: operators on DTensors may leave it whole, or as parts of a sum."""
    grad = parameter.grad
    if grad is None or not is_dtensor(grad) or not is_dtensor(parameter):
        return
    if grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def _stored(x: Tensor, piece: bool) -> Tensor:
    return x._local_tensor if is_dtensor(x) and (piece or x._local_tensor.shape == x.shape) else x


def keep_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Keep for the parameters what torch's SGD keeps for the tensors that it updates."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else []
    for parameter in (parameter for group in groups for parameter in group["params"]):
        if is_dtensor(parameter) and parameter._local_tensor in optimizer.state:
            for key, moment in optimizer.state.pop(parameter._local_tensor).items():
                optimizer.state[parameter][key] = like(parameter, moment)


def like(parameter: Tensor, piece: Tensor) -> Tensor:
    """Return a tensor that is cut as ``parameter`` is, of which ``piece`` is this rank's."""
    if not is_dtensor(parameter):
        return piece
    from torch.distributed.tensor import DTensor

    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(piece, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def to_empty(model: nn.Module, device: torch.device) -> None:
    """Give a model memory on ``device``, without numbers, as its own ``to_empty`` does, which makes several
    of a parameter that several modules hold.
    """
    holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(parameter, []).append((module, name))
    model.to_empty(device=device)
    for (first, name), *others in holders.values():
        for module, other in others:
            module.register_parameter(other, first.get_parameter(name))


def tensors_in(nest: object, *, records: bool = False) -> list[Tensor]:
    """Return the tensors in a nest of tuples, lists and dicts; modes ask this at every operator.

    ``records``: also those in dataclasses.
    """
    if isinstance(nest, Tensor):
        return [nest]
    if records and _is_record(nest):
        nest = _fields(nest)
    if isinstance(nest, dict):
        nest = nest.values()
    elif not isinstance(nest, list | tuple):
        return []
    likely = [element for element in nest if records or isinstance(element, _LIKELY)]
    return [tensor for element in likely for tensor in tensors_in(element, records=records)]


def _is_record(nest: object) -> bool:
    return is_dataclass(nest) and not isinstance(nest, type)


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record) if field.init}


def map_tensors(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nest, be it of dataclasses or what transformers' models return, with each of its
    tensors changed.
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if not _is_record(leaf):
            return leaf
        return replace(leaf, **{name: map_tensors(inner, change) for name, inner in _fields(leaf).items()})

    return tree_map(changed, nest)


def without_view(x: Tensor) -> Tensor:
    """Return a tensor that is no view of another: itself, or a copy."""
    return x.clone() if x._is_view() else x


def foreach_norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norm of each tensor, in ``dtype``; few kernels for all of them."""
    if any(is_host(tensor.device) and tensor.dtype != dtype for tensor in tensors):
        return [_norm_in_pieces(tensor, dtype) for tensor in tensors]
    return list(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def _norm_in_pieces(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the 2-norm, summed in another dtype than that of ``x``.

    Torch's own kernel for this adds one element after the other on a CPU: four times as slow, and 1e-4 off in
    fp32 for a tensor of some millions.
    """
    squares = x.new_zeros((), dtype=dtype)
    for piece in x.reshape(-1).split(_PIECE):
        cast = piece.to(dtype)
        squares = squares + torch.dot(cast, cast)
    return squares.sqrt()


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors, which have one dtype, by one number of that dtype, in place."""
    torch._foreach_mul_(list(tensors), factor)


def foreach_copy_(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each value into the tensor at its place."""
    if tensors:
        torch._foreach_copy_(list(tensors), list(values))
