"""Plan the memory of a rank that generates: weights, the cache of keys and values, and reading the prompts.

Both are traced: a forward of one block of each kind with a cache, without a backward after it. Prompts of
different lengths need a mask over all pairs of their tokens. Reading is an upper bound, because a stage may
hold fewer kinds of blocks.
"""

from dataclasses import dataclass

import torch

from ..layers import Stage
from ..models import Family, ModelConfig
from ..parallel_state import Layout, ParallelState
from ..simulation.micro_batch import MicroBatch
from .sampled_model import sampled

#: Bytes of a token beside keys and values: its document and its position in a cache, or its id and its
#: position, all int64.
_PLACES = 16
#: By how much reading may hold more than the blocks: what is made of ids and positions, and what a stage
#: gives.
_BESIDE = 1.05


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
    ``fused``: whether a GPU's fused kernels run, see ``MicroBatch``. Raises ``BadInput`` for a layout that
    cannot cut the model.
    """
    sample = sampled(family, config, layout)
    one_of = {kind: sample.block(number) for number, kind in enumerate(sample.kinds)}
    traced = sample.pieces.generation(one_of, MicroBatch(rows, length, dtype.itemsize, fused))
    # A sum over tensor ranks may be held a little longer by whoever sends it.
    sent = rows * length * config.hidden_size * dtype.itemsize if layout.tensor > 1 else 0
    plans = []
    for rank in range(layout.pipeline):
        state = ParallelState.stand_in(layout, layout.first_rank(rank))
        stage = Stage.of(config.num_hidden_layers, state=state)
        kinds = [sample.kinds[number] for number in stage.blocks]
        parameters = sample.parameters(state).every
        # The last token's logits: this rank's, all ranks' together, and in fp32 for the choice.
        logits = rows * config.vocab_size * (2 * dtype.itemsize + 4) if stage.last else 0
        plans.append(
            GenerationMemory(
                weights=parameters.here * dtype.itemsize + parameters.fixed_bytes,
                cache=sum(traced.caches[kind] for kind in kinds) + rows * length * _PLACES,
                reading=int(_BESIDE * traced.reading) + rows * length * _PLACES + logits + sent,
            )
        )
    return plans


def rows_that_fit(
    family: Family, config: ModelConfig, layout: Layout, dtype: torch.dtype, *, length: int, room: int
) -> int:
    """Return the most rows that can be generated at once with ``room`` bytes on each rank; 0 if none fits."""

    def totals(rows: int) -> list[int]:
        planned = generation_memory(family, config, layout, dtype, rows=rows, length=length)
        return [memory.total for memory in planned]

    # From two rows on, where masks are needed, each further row takes as much as the one before.
    two, three = totals(2), totals(3)
    if max(two) > room:
        return int(max(totals(1)) <= room)
    return min(
        2 + (room - of_two) // (of_three - of_two) for of_two, of_three in zip(two, three, strict=True)
    )
