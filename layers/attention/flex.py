"""Compute attention by FlexAttention, which compiles a kernel for the scores and the mask of a model.

A mask is a function of two tokens, with a list of the blocks of keys that each block of queries needs. Blocks
that a mask hides completely are not computed. Source: Dong et al. 2024 (FlexAttention).

B batch  S sequence  H query heads here  K key/value heads here  E head dim
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from ...parallel_state.engine.autograd_and_compiler import allow_graphs
from .scores import Scores

#: Tokens of a block of queries or keys.
BLOCK = 128
#: Graphs that are made, of shapes and changes of scores, before torch goes on without compiling.
_MOST_GRAPHS = 256

_ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def block_mask(first_BS: Tensor) -> BlockMask:
    """Return the mask in which a token sees the tokens from its first one, (B, S), up to itself.

    B may be 1 for rows that are alike.
    """
    length = first_BS.shape[1]
    blocks = -(-length // BLOCK)
    # Tokens after the end see what the last one sees, so that they add no blocks of keys.
    missing = blocks * BLOCK - length
    firsts = torch.cat((first_BS, first_BS[:, -1:].expand(-1, missing)), dim=1).unflatten(1, (blocks, BLOCK))
    lowest, highest = firsts.amin(2), firsts.amax(2)  # (B, blocks of queries)
    keys = torch.arange(blocks, device=first_BS.device) * BLOCK
    any_seen = (keys + BLOCK > lowest.unsqueeze(2)) & (keys <= keys.unsqueeze(1))
    all_seen = (keys >= highest.unsqueeze(2)) & (keys < keys.unsqueeze(1))
    if missing:  # a block that is not whole is never free of a mask
        all_seen[:, -1] = False
    parts = any_seen & ~all_seen

    same_rows = first_BS.shape[0] == 1

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= first_BS[torch.zeros_like(b) if same_rows else b, q])

    return BlockMask.from_kv_blocks(
        *_listed(parts), *_listed(all_seen), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(length, length)
    )


def _listed(blocks_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, (B, 1, Q), and which, these first."""
    which = torch.argsort(blocks_BQK.int(), dim=-1, descending=True, stable=True)
    return blocks_BQK.sum(-1, dtype=torch.int32).unsqueeze(1), which.int().unsqueeze(1)


def flex_attention(
    q_BHSE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    mask: BlockMask,
    scores: Scores,
) -> Tensor:
    """Compute attention like ``causal_attention``: (B, H, S, E), or as wide as ``v``."""
    compute: Any = torch_flex_attention if torch.compiler.is_compiling() else _compiled()
    slopes = None if scores.alibi is None else scores.alibi.steepness(q_BHSE.device)
    returned = compute(
        q_BHSE,
        k_BKSE,
        v_BKSE,
        score_mod=_changed(scores.soft_cap, slopes),
        block_mask=mask,
        scale=scores.scale,
        enable_gqa=q_BHSE.shape[1] != k_BKSE.shape[1],
        return_aux=None if scores.sinks is None else AuxRequest(lse=True),
    )
    if scores.sinks is None:
        out: Tensor = returned
        return out
    out, aux = returned
    # A sink takes its share of each softmax: the rest is the sum without it, over the sum with it.
    share = torch.sigmoid(aux.lse - scores.sinks.to(aux.lse.dtype).view(-1, 1))
    return out * share.to(out.dtype).unsqueeze(-1)


def _changed(soft_cap: float | None, slopes: Tensor | None) -> _ScoreMod | None:
    """Return what is done to a score, or ``None``: a soft cap, then a bias, as in ``blockwise``."""
    if soft_cap is None and slopes is None:
        return None

    def changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        return score if slopes is None else score + slopes[h] * (k - q)

    return changed


@cache
def _compiled() -> Callable[..., Tensor]:
    """Return FlexAttention for calls outside of compiled blocks; as it is, it would write out all scores.

    Each shape, and each change of the scores, is a graph of its own.
    """
    allow_graphs(_MOST_GRAPHS)
    compiled: Callable[..., Tensor] = torch.compile(torch_flex_attention, dynamic=False)
    return compiled
