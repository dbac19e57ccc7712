"""Make torch forget one process group before the next, so that each call starts afresh."""

from __future__ import annotations

import random
import sys

import numpy as np
import torch
from torch.distributed.tensor import _collective_utils, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def forget_groups() -> None:
    """Empty the caches that hold meshes, and so process groups: DTensor's, and compiled code.

    They take a later, equal mesh for the one that they know; that one's groups have been destroyed, and their
    names may since mean other ranks. Until they are let go, the threads of these groups go on.
    """
    _clear_sharding_prop_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    # Not in every version of torch.
    if clear := getattr(_redistribute, "clear_redistribute_planner_cache", None):
        clear()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def forget() -> None:
    """Reset seeds, defaults and caches."""
    forget_groups()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
