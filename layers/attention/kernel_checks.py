"""Try torch's private kernels on this machine before a model depends on them, for heads like the model's.

Each is compared once a process with scores written out in fp32, for each device, dtype and width of heads.
Ranks need not agree: what they send each other is the same with and without a kernel.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ...parallel_state.engine import accelerator
from ...parallel_state.engine.autograd_and_compiler import outside_modes
from .backends import FAILED, HALF, AttentionCall, Backend, PinnedBackend, choose_backend
from .blockwise import BlockAttentionOptions, attend, attend_backward, blockwise_attention, fused_takes
from .scores import Scores
from .varlen import sequences_of, varlen_attention
from .visible import starts_and_firsts, visible_tokens

Kernel = Literal["blocks", "varlen"]
_KINDS: dict[Kernel, str] = {"blocks": "fused attention", "varlen": "attention over documents"}


def checked_backend(call: AttentionCall, pinned: PinnedBackend, device: torch.device) -> Backend:
    """Choose a backend for a call on ``device``, as ``choose_backend`` does. ``varlen`` is taken only if it
    is right there, see ``is_right``; otherwise the choice is made without it, from now on.
    """
    chosen = choose_backend(call, pinned)
    if chosen == "varlen" and not torch.compiler.is_compiling():
        if not is_right("varlen", device, call.dtype, call.width):
            FAILED.add(call.heads)
        chosen = choose_backend(call, pinned)
    return chosen


def is_right(kernel: Kernel, device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return whether a kernel gives the numbers of the formula, for heads of this width.

    ``blocks``: flash attention with its log-sums, over one block of a longer sequence; ``varlen``: over
    documents. A warning says if it does not.
    """
    if not accelerator.has_numbers(device):
        return device.type != "meta" or accelerator.is_imagined(device)
    return _tried(kernel, device, dtype, width)


@lru_cache(maxsize=64)
@outside_modes()  # a trace has no numbers to compare
@torch.inference_mode(False)
@torch.enable_grad()
def _tried(kernel: Kernel, device: torch.device, dtype: torch.dtype, width: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    pairs = {"blocks": _blocks, "varlen": _documents}[kernel]
    try:
        for by_kernel, other in pairs(draw, width):
            worst = float((by_kernel - other).detach().abs().max() / other.detach().abs().max())
            if not worst <= (0.05 if dtype in HALF else 1e-4):
                raise RuntimeError(f"a difference of {worst:.1e}")
    except (RuntimeError, TypeError, ValueError, ImportError) as error:
        kind = f"{_KINDS[kernel]} on {device.type}"
        heads = f"heads of {width} in {str(dtype).removeprefix('torch.')}"
        warnings.warn(f"torch {torch.__version__}'s {kind} is not used for {heads}: {error}", stacklevel=2)
        return False
    return True


def _blocks(draw: Callable[..., Tensor], width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs, log-sums and gradients of a block that is part of a longer sequence, by the kernel and
    written out. Only a block that causality alone masks has as many keys as queries.
    """
    for causal, queries, keys in ((True, 64, 64), (False, 40, 96)):
        q, k, v, grad = (draw(1, 2, count, width) for count in (queries, keys, keys, queries))
        options = BlockAttentionOptions(width**-0.5, causal)
        if not fused_takes(q):
            return
        results = []
        for fused in (True, False):
            fused_options = replace(options, fused=fused)
            out, log_sums = attend(q, k, v, fused_options)
            # As other blocks' keys would raise them.
            grads = attend_backward(grad, q, k, v, out.to(q.dtype), log_sums + 0.7, fused_options)
            results.append((out, log_sums, *grads))
        yield from zip(*results, strict=True)


def _documents(draw: Callable[..., Tensor], width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs and gradients over documents, without and with a window, by kernel and written out."""
    q, k, v, grad = (draw(1, heads, 96, width) for heads in (4, 2, 2, 4))
    positions = torch.cat([torch.arange(n) for n in (40, 1, 55)]).unsqueeze(0)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    for window in (None, 17):
        sequences = sequences_of(positions, 1, 96, q.device, window)
        mask = visible_tokens(starts_and_firsts(positions, window)[1], 96).to(q.device)
        by_kernel = varlen_attention(q, k, v, sequences)
        written_out = blockwise_attention(q, k, v, mask, Scores(), causal=False)
        yield by_kernel, written_out
        yield from zip(
            *(torch.autograd.grad(out, inputs, grad) for out in (by_kernel, written_out)), strict=True
        )
