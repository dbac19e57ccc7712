"""Cut groups of neighbouring heads that share something, such as a key/value head (grouped-query attention,
GQA). With more tensor ranks than key/value heads, a head is repeated on each rank that has queries of it.
"""

import torch
from torch import Tensor

from ..parallel_state import ParallelState, require, shared_units


class HeadGroups:
    """Tell which group each head of this tensor rank belongs to. All groups have the same number of heads.

    ``held``: the groups that have heads on this rank; ``counts``: the number of these heads for each group;
    ``even``: whether these numbers are equal. ``shared``: whether some groups have heads on several ranks,
    because the tensor axis does not divide the number of groups. Raises ``BadInput`` if the groups cannot be
    equal.
    """

    def __init__(self, heads: int, groups: int, state: ParallelState) -> None:
        require(heads % groups == 0, "heads", "groups", f"a divisor of {heads} heads", groups)
        size, index, group_size = state.tensor.size, state.tensor.index, heads // groups
        rank_heads = shared_units(heads, size, index)
        self.groups, self.shared = groups, groups % size > 0
        self.held = shared_units(groups, size, index)
        self.counts = [sum(head // group_size == group for head in rank_heads) for group in self.held]
        self.even = len({*self.counts}) == 1

    def spread(self, x: Tensor) -> Tensor:
        """Repeat each group's entry for its heads: (B, groups here, ...) to (B, heads here, ...).

        If this rank has one group, ``x`` is returned as it is, (B, 1, ...).
        """
        if len(self.counts) == 1:
            return x
        parts = zip(x.split(1, dim=1), self.counts, strict=True)
        return torch.cat([part.expand(-1, count, *x.shape[2:]) for part, count in parts], dim=1)

    def sums(self, x: Tensor) -> Tensor:
        """Sum over the heads of each group: (B, heads here, ...) becomes (B, groups here, ...)."""
        if len(self.counts) == 1:
            return x.sum(1, keepdim=True)
        return torch.stack([part.sum(1) for part in x.split(self.counts, dim=1)], dim=1)
