"""Attention over documents of different lengths, one after the other, by torch's flash attention for these.

B batch  S sequence  H query heads here  K key/value heads here  E head dim
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ..host_numbers import on_host
from .blockwise import widened

#: Torch's ``varlen_attn``. The import takes half a second, so it waits until the function is needed, but not
#: until a block runs: a compiled block cannot import.
_kernel: Callable[..., Any] | None = None


def _load_kernel() -> None:
    global _kernel
    if _kernel is None:
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.11 takes groups of heads without being told.
        takes_gqa = "enable_gqa" in signature(varlen_attn).parameters
        _kernel = partial(varlen_attn, enable_gqa=True) if takes_gqa else varlen_attn


#: Of a batch's documents, its rows one after the other: the first token of each and the number of all tokens,
#: (documents + 1,), int32; tokens of the longest one; the window, see ``AttentionScope``.
Sequences = tuple[Tensor, int, int | None]


def sequences_of(
    positions_BS: Tensor | None, batch: int, length: int, device: torch.device, window: int | None = None
) -> Sequences:
    """Return the sequences of ``batch`` rows of ``length`` tokens; a document starts where its position is 0.

    ``positions_BS``: B may be 1 for rows that are alike; ``None``: each row is one document. If only an
    accelerator has them this waits for it: the kernel takes the number of documents and the longest.
    """
    _load_kernel()
    starts = torch.zeros(batch, length, dtype=torch.bool)
    if positions_BS is not None:
        here_BS = on_host(positions_BS)
        starts |= (positions_BS.cpu() if here_BS is None else here_BS) == 0
    starts[:, 0] = True
    places = torch.cat((starts.flatten().nonzero().squeeze(1), torch.tensor([starts.numel()])))
    longest = int(places.diff().max())
    return places.to(device, torch.int32, non_blocking=True), longest, window


def varlen_attention(
    q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, sequences: Sequences, *, scale: float | None = None
) -> Tensor:
    """Compute causal attention inside each of the sequences: (B, H, S, E), or as wide as ``v``."""
    batch, width, (starts, longest, window) = q_BHSE.shape[0], v_BKSE.shape[-1], sequences
    # (B S, heads, E): the projections return tokens before heads, so that q and k are views.
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q_BHSE, k_BKSE, widened(v_BKSE, q_BHSE)))
    before = -1 if window is None else window - 1
    assert _kernel is not None, "sequences come first"
    out = _kernel(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(before, 0))
    heads_BHSE: Tensor = out[..., :width].unflatten(0, (batch, -1)).transpose(1, 2)
    return heads_BHSE
