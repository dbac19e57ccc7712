"""Plan the memory of a rank that generates: weights, the cache of keys and values, and reading the prompts.

The cache is counted exactly, from what each layer states (``cache_bytes``). Reading is an upper bound: no
backward follows, so a rank holds one block's results at a time, at most as many bytes as training keeps of
the block and needs in its backward. Prompts of different lengths need a mask over all pairs of their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..layers import Stage, Tokens, attention_kinds, cost_of
from ..models import Family, ModelConfig
from ..parallel_state import Layout, ParallelState
from .kinds_of_blocks import sampled

#: Bytes of a token in a cache beside keys and values: its document and its position, both int64.
_PLACES = 16
#: Bytes of a mask's number beside those of its dtype, in which it is added to scores.
_MASK = 1


@dataclass(frozen=True)
class GenerationMemory:
    """Hold the bytes of one rank. ``cache``: of all rows; ``reading``: at most, while prompts are read."""

    weights: int
    cache: int
    reading: int

    @property
    def total(self) -> int:
        """Return the bytes at the worst moment."""
        return self.weights + self.cache + self.reading


def generation_memory(
    family: Family,
    config: ModelConfig,
    layout: Layout,
    dtype: torch.dtype,
    *,
    rows: int,
    length: int,
    fused: bool = True,
) -> list[GenerationMemory]:
    """Return the memory of the first rank of each pipeline rank while ``rows`` rows are generated at once.

    ``length``: the most tokens of a row, those of its prompt included; a prompt may be nearly as long.
    ``fused``: as in ``Tokens``. Raises ``BadInput`` for a layout that cannot cut the model.
    """
    sample = sampled(family, config, layout)
    tokens = Tokens(rows, length, config.hidden_size, dtype.itemsize, fused)
    one_of = {kind: sample.block(number) for number, kind in enumerate(sample.kinds)}
    caches = {kind: cache_of(block, tokens) for kind, block in one_of.items()}
    costs = {kind: cost_of(block, tokens) for kind, block in one_of.items()}
    reading = {kind: cost.kept + cost.working for kind, cost in costs.items()}
    masks = rows * length**2 * (dtype.itemsize + _MASK) * _masks(list(one_of.values()), rows, length)
    found = []
    for rank in range(layout.pipeline):
        state = ParallelState.stand_in(layout, layout.first_rank(rank))
        stage = Stage.of(config.num_hidden_layers, state=state)
        kinds = [sample.kinds[number] for number in stage.blocks]
        held = sample.parameters(state).every
        # The last token's logits: this rank's, all ranks' together, and in fp32 for the choice.
        logits = rows * config.vocab_size * (2 * dtype.itemsize + 4) if stage.last else 0
        found.append(
            GenerationMemory(
                weights=held.here * dtype.itemsize + held.fixed_bytes,
                cache=int(sum(caches[kind] for kind in kinds)) + rows * length * _PLACES,
                reading=int(max(reading[kind] for kind in kinds)) + masks + logits,
            )
        )
    return found


def rows_that_fit(
    family: Family, config: ModelConfig, layout: Layout, dtype: torch.dtype, *, length: int, room: int
) -> int:
    """Return the most rows that can be generated at once with ``room`` bytes on each rank; 0 if none fits."""

    def totals(rows: int) -> list[int]:
        planned = generation_memory(family, config, layout, dtype, rows=rows, length=length)
        return [one.total for one in planned]

    # From two rows on, where masks are needed, each further row takes as much as the one before.
    two, three = totals(2), totals(3)
    if max(two) > room:
        return int(max(totals(1)) <= room)
    return min(2 + (room - one) // (more - one) for one, more in zip(two, three, strict=True))


def _masks(blocks: Sequence[nn.Module], rows: int, length: int) -> int:
    """Return how many masks a forward makes: one for each window that hides something, and one where
    prompts may have different lengths.
    """
    windows = {one.window for block in blocks for one in attention_kinds(block)}
    hiding = {window for window in windows if window is not None and window < length}
    return len(hiding) + (rows > 1 and hiding != windows)


def cache_of(block: nn.Module, tokens: Tokens) -> float:
    """Return the bytes that the layers of a block keep in a ``KeyValueCache`` of these tokens."""
    stated = (getattr(layer, "cache_bytes", None) for layer in block.modules())
    return float(sum(count(tokens) for count in stated if count is not None))
