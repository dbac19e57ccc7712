"""The same numbers again: torch's algorithms that add in one order, for as long as a run lasts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """With ``on``, torch takes deterministic algorithms, and raises ``RuntimeError`` where it has none.

    Enter it before anything runs on CUDA: cuBLAS reads how much workspace it may use, on which its order of
    sums depends, once. What the user has set in the environment stays. All is as it was at the end.
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
