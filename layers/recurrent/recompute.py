"""Compute a function again in its backward, so that only its inputs are kept."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return ``function(*inputs)``, which backward computes again; the gradients are those of ``function``.

    A recurrence in chunks makes several times the bytes of its inputs. ``function`` must be a function of
    ``inputs`` alone, draw no random numbers, and may be collective. ``torch.compile`` traces it as it is.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function(*inputs)
    made: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return made
