"""Call torch's functional collectives: they return new tensors, there and traced by its compiler."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops._c10d_functional


def wait_tensor(x: Tensor) -> Tensor:
    """Wait until ``x``, the result of a collective, is there. Waits are timed by replacing this function."""
    return cast(Tensor, _ops.wait_tensor(x))


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """Return a new tensor: ``x`` reduced (``sum`` or ``max``) over the ranks of ``group``."""
    out = _ops.all_reduce(x.contiguous(), op, group.group_name)
    return wait_tensor(out)


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' tensors, which have one shape, along ``dim``."""
    size = group.size()
    out = wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    if dim == 0 or x.ndim == 0:
        return out
    if _first_of_all(x, dim):  # one row, say: the pieces lie as they should
        return out.view(*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat(out.chunk(size, dim=0), dim=dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks; each rank keeps its equal piece of ``dim``."""
    return reduce_scatter_start(x, dim, group)()


def reduce_scatter_start(x: Tensor, dim: int, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin a ``reduce_scatter``; the function that is returned waits for it and gives the piece."""
    size = group.size()
    shape = (*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    if _first_of_all(x, dim):
        x = x.flatten(0, dim)
    elif dim != 0:
        x = torch.cat(x.chunk(size, dim=dim), dim=0)
    out = _ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group.group_name)
    return lambda: wait_tensor(out).view(shape)


def all_reduce_start(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to sum ``x`` over the ranks in its own memory; the function returned waits and gives the sum."""
    # The compiler, which plans memory itself, wants the operator that returns a new tensor.
    start = _ops.all_reduce if torch.compiler.is_compiling() else _ops.all_reduce_
    out = start(x.contiguous(), "sum", group.group_name)
    return lambda: wait_tensor(out)


def _first_of_all(x: Tensor, dim: int) -> bool:
    """Tell whether pieces of ``dim`` lie one after the other in memory: no dim before it has several."""
    return dim > 0 and all(length == 1 for length in x.shape[:dim])


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send ``sent[r]`` rows of ``x``, in order, to each rank r, and return the ``received[r]`` rows of each.

    The host knows the numbers of rows; any of them may be 0.
    """
    out = _ops.all_to_all_single(x.contiguous(), [*received], [*sent], group.group_name)
    return wait_tensor(out)


def ring_exchange_start(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send ``x`` to the next rank of the ring while the one before sends its own, of the same shape.

    Returns at once; ``ring_exchange_wait`` waits. An all-to-all in which each rank has something for one
    other alone: unlike sends it comes in order with the group's other collectives, and needs no tags.
    """
    size, rank = group.size(), group.rank()
    received = [x.numel() if peer == (rank + 1) % size else 0 for peer in range(size)]
    sent = [x.numel() if peer == (rank - 1) % size else 0 for peer in range(size)]
    coming = _ops.all_to_all_single(x.contiguous().view(-1), sent, received, group.group_name)
    return cast(Tensor, coming)


def ring_exchange_wait(coming: Tensor, like: Tensor) -> Tensor:
    """Wait for the previous rank's piece and return it, in the shape of ``like``."""
    return wait_tensor(coming).view(like.shape)


def abort_groups() -> None:
    """Give up all process groups of this rank at once; collectives that still run end here, with an error."""
    dist.distributed_c10d._abort_process_group()


def default_store() -> dist.Store:
    """Return the key-value store at which the ranks of the default process group met."""
    return dist.distributed_c10d._get_default_store()


def group_of_call(args: Iterable[Any]) -> dist.ProcessGroup:
    """Return the group that a collective operator is given, as an object or by name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):  # it comes before a reduction, also an object of torch's
            return dist.ProcessGroup.unbox(arg)
    name: Any = [arg for arg in args if isinstance(arg, str)][-1]
    return dist.distributed_c10d._resolve_process_group(name)
