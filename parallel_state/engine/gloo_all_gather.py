"""Replace the one gloo operation of torch's functional collectives that damages the heap of its process.

A gloo group has two threads. The thread that has run a collective writes the name of its kind to a string of
the group, without a lock (``ProcessGroupGloo::runLoop`` in torch 2.11 to 2.13). Names of up to 15 letters lie
inside the string, and nothing happens. ``ALLGATHER_COALESCED``, with 19 letters, lies on the heap: if both
threads write at once, they free the same memory twice or write to freed memory, and the process ends later,
anywhere, with "malloc(): unaligned tcache chunk detected", "double free" or SIGSEGV. torch's functional
``all_gather_into_tensor``, with or without ``_coalesced``, is of this kind. Its variant with ``out``, and
``dist.all_gather_into_tensor``, are an ``ALLGATHER``. One thread a group would help, too, but a small
all-reduce took five times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


@cache
def gather_safely() -> torch.library.Library:
    """Let the functional all-gathers of host tensors, whoever calls them, be of the harmless kind from now on.

    The results are the same. DTensor, compiled code and a user's own group are included. The kernels stay as
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
