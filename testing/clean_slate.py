"""What torch remembers from one process group to the next, forgotten: each call starts afresh."""

from __future__ import annotations

import random
import sys

import numpy as np
import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def forget() -> None:
    """Reset seeds, defaults and caches.

    DTensor caches the outcome of an operator with the mesh inside, and takes a later, equal mesh for the same
    one; that mesh's groups have been destroyed, and their names may since mean other ranks. Compiled code
    holds names of groups as well.
    """
    _clear_sharding_prop_cache()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
