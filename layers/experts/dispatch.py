"""Move tokens to their experts and back: sort them by expert, send them to its rank, drop none.

N tokens here  K experts a token  M = N K rows  E experts  R ranks of the expert group  D hidden
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...parallel_state import ParallelState
from ...parallel_state.engine.collectives import all_to_all
from ..collectives import pair
from .grouped_matmul import GroupSizes


class Dispatch:
    """Send the tokens of one batch to their experts' ranks and back.

    Made from the experts that each token chose, (N, K) int64. ``to_experts`` brings rows to this rank's
    experts; ``counts`` is the number of rows for each of them, in order. ``back`` returns the experts'
    outputs. All ranks of the expert group make a dispatch at the same time, also ranks without tokens. With
    several expert ranks the host waits once for the numbers of rows; with one it does not wait. Source: Gale
    et al. 2022 (no token is dropped), Lepikhin et al. 2020 (the exchange).
    """

    def __init__(self, experts_NK: Tensor, num_experts: int, *, state: ParallelState) -> None:
        self.state, self.ranks = state, state.layout.expert
        self.tokens, self.top_k = experts_NK.shape
        flat = experts_NK.reshape(-1)
        # Stable: tokens of an expert stay in order, so sums are the same each time.
        by_expert, self._order = flat.sort(stable=True)
        self._inverse = inverse_of(self._order)
        # Unlike bincount, which asks the device for the largest number, a search does not wait.
        experts = torch.arange(num_experts, device=flat.device)
        ends_E = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        if self.ranks == 1:
            self.counts = GroupSizes(ends_E)
            return
        chosen_E = ends_E.long().diff(prepend=ends_E.new_zeros(1))
        rank_experts = num_experts // self.ranks
        sizes = [rank_experts] * self.ranks
        received_E = all_to_all(chosen_E, sizes, sizes, state.expert.group)
        table = torch.stack([chosen_E, received_E]).view(2, self.ranks, rank_experts)
        sent, received = table.tolist()
        self._sent, self._received = [sum(row) for row in sent], [sum(row) for row in received]
        ends_here = received_E.view(self.ranks, rank_experts).sum(0).cumsum(0).to(torch.int32)
        self.counts = GroupSizes(ends_here, [sum(column) for column in zip(*received, strict=True)])
        # Rows come by rank and then by expert; the experts want them by expert.
        labels = torch.arange(rank_experts, device=flat.device).repeat(self.ranks)
        self._by_expert = labels.repeat_interleave(received_E, output_size=sum(self._received)).argsort(
            stable=True
        )
        self._by_rank = inverse_of(self._by_expert)

    def to_experts(self, x_ND: Tensor) -> Tensor:
        """Return the rows for this rank's experts, sorted by expert: a token once for each that it chose."""
        rows_MD = x_ND.unsqueeze(1).expand(-1, self.top_k, -1).reshape(-1, x_ND.shape[1])
        rows_MD = rows_MD.index_select(0, self._order)
        if self.ranks == 1:
            return rows_MD
        return self._exchange(rows_MD, self._received, self._sent).index_select(0, self._by_expert)

    def back(self, y_MD: Tensor) -> Tensor:
        """Return the experts' outputs (N, K, D) for each token, from rows in the order of ``to_experts``."""
        if self.ranks > 1:
            y_MD = self._exchange(y_MD.index_select(0, self._by_rank), self._sent, self._received)
        return y_MD.index_select(0, self._inverse).view(self.tokens, self.top_k, y_MD.shape[1])

    def _exchange(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        there = partial(all_to_all, received=received, sent=sent)
        back = partial(all_to_all, received=sent, sent=received)
        return pair(x, self.state.expert, there, back)


def inverse_of(order: Tensor) -> Tensor:
    """Return the permutation that undoes this one."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
