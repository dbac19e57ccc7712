"""Make torch repeat the same numbers, with algorithms that add in one order, for as long as a run lasts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Make torch take deterministic algorithms, if ``on``; where it has none it raises ``RuntimeError``.

    Enter it before anything runs on CUDA: cuBLAS reads only once how much workspace it may use, and its order
    of sums depends on that. A value that the user has set in the environment stays. Everything is restored at
    the end.
    """
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    ours = _WORKSPACE not in os.environ
    if ours:
        os.environ[_WORKSPACE] = ":4096:8"  # of the two that NVIDIA names, the faster
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        if ours:
            del os.environ[_WORKSPACE]
