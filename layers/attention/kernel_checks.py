"""Try kernels that no test has run on this machine, once a process, before a model depends on them."""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch

from .backends import FAILED
from .blockwise import blockwise_attention
from .varlen import sequences_of, varlen_attention
from .visible import documents, visible_tokens


@lru_cache(maxsize=64)
@torch.inference_mode(False)
@torch.enable_grad()
def check_varlen(device: str) -> None:
    """Compare outputs and gradients over documents, in bfloat16, with scores written out in fp32.

    Where they differ, or the kernel cannot run, a warning says so and ``auto`` no longer takes ``varlen``.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, 96, 64), (1, 2, 96, 64), (1, 2, 96, 64), (1, 4, 96, 64)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)
    positions = torch.cat([torch.arange(n) for n in (40, 1, 55)]).unsqueeze(0)
    number = documents(positions).to(device)
    given = [one.requires_grad_() for one in (q, k, v)]
    try:
        for window in (None, 17):
            sequences = sequences_of(positions, 1, 96, q.device, window)
            mask = visible_tokens(number, number, window)
            found = varlen_attention(q, k, v, sequences)
            wanted = blockwise_attention(q, k, v, mask, causal=False)
            pairs = [(found, wanted)]
            gradients = (torch.autograd.grad(one, given, grad) for one in (found, wanted))
            pairs += zip(*gradients, strict=True)
            for one, other in pairs:
                worst = float((one - other).detach().abs().max() / other.detach().abs().max())
                if not worst <= 0.05:
                    raise RuntimeError(f"a difference of {worst:.1e}")
    except (RuntimeError, TypeError, ValueError, ImportError) as error:
        said = f"torch {torch.__version__}'s attention over documents on {device} is not used: {error}"
        warnings.warn(said, stacklevel=2)
        FAILED.add("varlen")
