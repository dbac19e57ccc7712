"""Replace the gloo operation of torch's functional all-gathers, which damages the heap of its process.

A gloo group has two threads. The thread that has run a collective writes the name of its kind to a string of
the group, without a lock (``ProcessGroupGloo::runLoop``, torch 2.11 to 2.13). A name of up to 15 letters lies
inside the string object, and nothing happens. ``ALLGATHER_COALESCED``, with 19, lies on the heap: if both
threads write at once, they free memory twice or write to freed memory. The process ends later, anywhere, with
"malloc(): unaligned tcache chunk detected", "double free" or SIGSEGV. ``all_gather_into_tensor`` of torch's
functional collectives, with and without ``_coalesced``, is of this kind; its variant with ``out`` is an
``ALLGATHER``. With one thread a group a small all-reduce took five times as long on two busy cores.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


@cache
def gather_safely() -> torch.library.Library:
    """Compute torch's functional all-gathers of host tensors by an ``ALLGATHER`` in this process from now on.

    The results are the same. It holds for all groups and callers, DTensor and compiled code among them, as
    long as the library that is returned.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _all_gather, "CPU")
    library.impl("all_gather_into_tensor_coalesced", _all_gather_each, "CPU")
    return library


def _all_gather(x: Tensor, size: int, group_name: str) -> Tensor:
    if x.is_complex():  # gloo knows none
        return torch.view_as_complex(_all_gather(torch.view_as_real(x), size, group_name))
    shape = (size * x.shape[0], *x.shape[1:]) if x.ndim else (size,)
    start = torch.ops._c10d_functional.all_gather_into_tensor_out.default
    gathered: Tensor = start(x, size, group_name, out=x.new_empty(shape))
    return gathered


def _all_gather_each(xs: Sequence[Tensor], size: int, group_name: str) -> list[Tensor]:
    return [_all_gather(x, size, group_name) for x in xs]
