"""Compute the selective state space of Mamba-2 in chunks, in plain torch.

A state S (state dim x head dim) starts at 0. Each token t decays it and adds to it: S <- a_t S + B_t x_t^T;
its output is S^T C_t. Within a chunk all pairs of tokens are computed at once, as attention without softmax;
between chunks the state is handed on. Source: Dao and Gu 2024 (section 6).

R runs  L tokens of a run  H heads here  G groups of heads here  N chunks  T tokens of a chunk  P head dim
S state dim
"""

from operator import mul

import torch
from torch import Tensor

from ...parallel_state import ParallelState
from ..autocast import without_autocast
from ..head_groups import HeadGroups
from .decay import Decay, in_chunks, scan
from .runs import Runs


@without_autocast
def state_space(
    x_RLHP: Tensor,
    log_decay_RLH: Tensor,
    into_RLGS: Tensor,
    out_RLGS: Tensor,
    runs: Runs,
    first: Tensor | None = None,
    *,
    groups: HeadGroups | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (R, L, H, P) and the state after each run (R, H, S, P), in at least fp32.

    ``into_RLGS`` and ``out_RLGS``: B and C, which the heads of a group share. ``first``: the state before
    each row; the default: 0. ``groups``: which heads share them; the default: all. Collective over the
    context ranks, in backward too.
    """
    groups = groups or HeadGroups(x_RLHP.shape[2], 1, ParallelState.alone())
    inner = torch.promote_types(x_RLHP.dtype, torch.float32)
    length = x_RLHP.shape[1]
    x = in_chunks(x_RLHP.to(inner).transpose(1, 2), 2)  # (R, H, N, T, P)
    # (R, G, N, T, S)
    b, c = (in_chunks(tensor.to(inner).transpose(1, 2), 2) for tensor in (into_RLGS, out_RLGS))
    pairs, b, c = groups.spread(c @ b.mT), groups.spread(b), groups.spread(c)
    left = Decay(in_chunks(log_decay_RLH.to(inner).transpose(1, 2), 2), runs.places)

    written = b.mT @ (x * left.after.unsqueeze(-1))  # (R, H, N, S, P)
    through = left.through[..., None, None]
    if first is None:
        first = x.new_zeros(len(x) // runs.in_row, x.shape[1], b.shape[-1], x.shape[-1])
    if runs.in_row > 1:
        nothing = torch.zeros_like(written[:, :, 0])
        whole = torch.cat(
            (scan(mul, through, written, nothing)[1], through.prod(2).expand_as(nothing[:, :, :1])), 2
        )
        first = runs.states_before(whole, first, _after)
    before, last = scan(mul, through, written, first)  # (R, H, N, S, P)
    y = (pairs * left.between) @ x + (c @ before) * left.before.unsqueeze(-1)
    return y.flatten(2, 3)[:, :, :length].transpose(1, 2), last


def _after(run: Tensor, state: Tensor) -> Tensor:
    """Return the state after a run, which is what the run writes and, in a last row, what it leaves."""
    after: Tensor = run[..., -1:, :] * state + run[..., :-1, :]
    return after
