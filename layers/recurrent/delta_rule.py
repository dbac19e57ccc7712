"""Compute the gated delta rule in chunks, in plain torch.

A state S (key dim x value dim) starts at 0. Each token t decays it and then moves what it answers to the
token's key towards the token's value: S <- a_t S, S <- S + b_t k_t (v_t - S^T k_t)^T; its output is S^T q_t.
Within a chunk the corrections of all tokens are found at once, by solving a triangular system; what a chunk
makes of the state before it is S <- M S + N. Source: Yang et al. 2024, Gated Delta Networks (section 3.3).

R runs  L tokens of a run  K key heads  G value heads a key head  N chunks  T tokens of a chunk
E key dim  V value dim
"""

from operator import matmul

import torch
from torch import Tensor

from ..autocast import without_autocast
from .decay import Decay, in_chunks, scan
from .runs import Runs


@without_autocast
def gated_delta_rule(
    q_RLKE: Tensor,
    k_RLKE: Tensor,
    v_RLHV: Tensor,
    log_decay_RLH: Tensor,
    beta_RLH: Tensor,
    runs: Runs,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (R, L, H, V) and the state after each run (R, K, G, E, V), in at least fp32.

    Queries and keys are brought to length 1 here; consecutive value heads share a key head. ``first``: the
    state before each row; the default: 0. Collective over the context ranks, in backward too.
    """
    inner = torch.promote_types(q_RLKE.dtype, torch.float32)
    length, heads = q_RLKE.shape[1:3]
    # (R, K, 1, N, T, E), (R, K, G, N, T, V), (R, K, G, N, T)
    q, k = (_unit(x.to(inner)).transpose(1, 2).unsqueeze(2) for x in (q_RLKE, k_RLKE))
    q, k = in_chunks(q * q.shape[-1] ** -0.5, 3), in_chunks(k, 3)
    v = in_chunks(v_RLHV.to(inner).unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4), 3)
    decay, beta = (
        in_chunks(x.to(inner).unflatten(2, (heads, -1)).permute(0, 2, 3, 1), 3)
        for x in (log_decay_RLH, beta_RLH)
    )
    left = Decay(decay, runs.places)

    system = (k @ k.mT) * left.between * beta.unsqueeze(-1)  # only below the diagonal
    asked = torch.cat((v, k * left.before.unsqueeze(-1)), dim=-1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, asked, upper=False, unitriangular=True)
    # What a chunk writes is ``new`` less what it takes back of the state before it.
    new, taken = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    ends = (k * left.after.unsqueeze(-1)).mT
    identity = torch.eye(k.shape[-1], dtype=inner, device=k.device)
    through = left.through[..., None, None] * identity - ends @ taken  # M
    written = ends @ new  # N

    if first is None:
        rows = len(q) // runs.in_row
        first = q.new_zeros(rows, *written.shape[1:3], *written.shape[-2:])
    if runs.in_row > 1:
        first = runs.states_before(_through_run(through, written), first, _after)
    before, last = scan(matmul, through, written, first)  # (R, K, G, N, E, V)
    own = (q @ k.mT) * left.between
    y = (q * left.before.unsqueeze(-1)) @ before + own @ (new - taken @ before)
    y = y.flatten(3, 4)[:, :, :, :length].permute(0, 3, 1, 2, 4)  # (R, L, K, G, V)
    outputs: Tensor = y.flatten(2, 3)
    return outputs, last


def _through_run(through: Tensor, written: Tensor) -> Tensor:
    """Return what a whole run makes of a state, (R, K, G, E, E + V): M and N side by side."""
    width = through.shape[-1]
    both = torch.cat((torch.zeros_like(through), written), dim=-1)
    identity = torch.eye(width, dtype=both.dtype, device=both.device)
    start = torch.cat(
        (identity.expand_as(through[:, :, :, 0]), torch.zeros_like(written[:, :, :, 0])), dim=-1
    )
    return scan(matmul, through, both, start)[1]


def _after(run: Tensor, state: Tensor) -> Tensor:
    """Return the state after a run."""
    through, written = run.split((run.shape[-2], state.shape[-1]), dim=-1)
    after: Tensor = through @ state + written
    return after


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
