"""Cut a sequence over c context ranks into 2 c equal chunks; rank i holds the i-th and the i-th from the end.

If each rank held one run of the sequence, the last rank's tokens would see all other tokens, and the first
rank's tokens almost none. With two chunks every rank computes the same amount of attention, in total and with
the keys of each single rank. Source: Brandon et
al. 2023 (striped attention, on the imbalance); Llama 3, section 3.3.2; Megatron-LM's context parallelism.
"""

import torch
from torch import Tensor

from ..parallel_state import ParallelState, engine
from .collectives import pair


def own_chunks(rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of the chunks that a context rank holds, out of ``2 * size``."""
    return rank, 2 * size - 1 - rank


def cut_sequence(x: Tensor, state: ParallelState, *, dim: int = 1) -> Tensor:
    """Return this context rank's chunks of a whole ``dim`` in a row; on one context rank, ``x`` itself.

    Use it for ids, labels and positions, not activations. Raises ``BadInput`` for unequal chunks.
    """
    size = state.context.size
    if size == 1:
        return x
    state.layout.check_length(x.shape[dim], "input", f"dim {dim} of shape {[*x.shape]}")
    chunks = x.chunk(2 * size, dim)
    return torch.cat([chunks[number] for number in own_chunks(state.context.index, size)], dim)


def token_places(length: int, state: ParallelState, device: torch.device | None = None) -> Tensor:
    """Return the places of this context rank's ``length`` tokens in the whole sequence: (length,) int64."""
    return cut_sequence(torch.arange(length * state.context.size, device=device), state, dim=0)


def sum_over_context(x: Tensor, state: ParallelState) -> Tensor:
    """Return the sum of ``x`` over the context ranks, such as what a row's tokens are together.

    Each rank then computes with the sum, and its loss counts: the gradients are summed as well. So a loss of
    rows is added up, and counted, on each of the ranks.
    """
    return pair(x, state.context, engine.all_reduce, engine.all_reduce)


def default_positions(x: Tensor, state: ParallelState, *, embedded: bool) -> Tensor:
    """Return positions 0 to S-1 of the whole sequence for ids (B, S) or, ``embedded``, hidden states.

    With sequence parallelism hidden states are this rank's piece (B, S / tensor, D). With several context
    ranks ``x`` is this rank's chunks of the sequence, and so are the positions: (S / context,).
    """
    length = x.shape[1] * (state.tensor.size if embedded and state.sequence else 1)
    return token_places(length, state, x.device)
