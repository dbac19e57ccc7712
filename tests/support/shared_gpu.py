"""Let several ranks share one GPU: collectives of CUDA tensors travel through the host, over gloo.

NCCL refuses two ranks on one GPU, and gloo alone crashes at a send or an all-to-all of CUDA tensors. This is
for comparisons of layouts on a machine with few GPUs, never for speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from trilith.parallel_state.engine import tensors_in

_library: torch.library.Library | None = None


def share_gpu() -> None:
    """Route the collectives of CUDA tensors through the host, in this process, from now on.

    The process group must be gloo's for both devices, as ``init_process_group("gloo")`` makes it.
    """
    global _library
    if _library is None:
        _library = torch.library.Library("c10d", "IMPL")
        for name, through_host in STAGED.items():
            _library.impl(name, through_host, "CUDA", allow_override=True)


def _staged(name: str, written: int) -> Callable[..., Any]:
    """Return the operator ``c10d::name`` with its tensors on the host; argument ``written`` is its output."""
    operator = getattr(torch.ops.c10d, name)

    def run(*args: Any, **options: Any) -> Any:
        here = [_map(one, Tensor.cpu) for one in args]
        found = operator(*here, **options)
        work = found[-1] if isinstance(found, tuple) else found
        work.wait()
        for ours, theirs in zip(tensors_in(args[written]), tensors_in(here[written]), strict=True):
            ours.copy_(theirs)
        return (args[written], work) if isinstance(found, tuple) else work

    return run


def _send(tensors: Sequence[Tensor], *args: Any) -> Any:
    return torch.ops.c10d.send([one.cpu() for one in tensors], *args)


def _receive(tensors: Sequence[Tensor], *args: Any) -> Any:
    """Receive in the background: a peer may first wait for something that this rank does afterwards."""
    here = [torch.empty_like(one, device="cpu") for one in tensors]
    coming, done = torch.ops.c10d.recv_(here, *args), torch.futures.Future[list[Tensor]]()

    def finish() -> None:
        try:
            coming.wait()
            for ours, theirs in zip(tensors, here, strict=True):
                ours.copy_(theirs)
                if ours.is_cuda:
                    torch.cuda.synchronize(ours.device)
            done.set_result([*tensors])
        except BaseException as error:
            cast(Any, done).set_exception(error)  # whatever it is, it belongs to the one who waits

    threading.Thread(target=finish, daemon=True).start()
    made: Any = torch._C._distributed_c10d
    return made._create_work_from_future(done).boxed()  # a handle, as the operator returns it


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)) and [*tensors_in(value)]:
        return [_map(one, change) for one in value]
    return value


#: Operators of torch by name, as they are done for CUDA tensors.
STAGED: dict[str, Callable[..., Any]] = {
    **{name: _staged(name, 0) for name in ("allreduce_", "broadcast_", "allreduce_coalesced_", "allgather_")},
    **{name: _staged(name, 0) for name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")},
    **{name: _staged(name, 0) for name in ("allgather_into_tensor_coalesced_", "reduce_scatter_")},
    **{name: _staged(name, 0) for name in ("reduce_scatter_tensor_coalesced_", "alltoall_", "reduce_")},
    "send": _send,
    "recv_": _receive,
}
