"""Choose the blocks of each stage of a run: by hand, or by their costs, embedding and output counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..layers import all_stages, split_blocks, stage_parts
from ..models import AdaptedFamily, Family, ModelConfig
from ..parallel_state import Layout
from ..pipeline.cut import cut_by_cost, stage_costs
from ..simulation.model_flops import flops_of_config
from .own.module import OwnFamily


@dataclass(frozen=True, slots=True)
class StageCut:
    """State the number of blocks of each stage, and its cost in FLOPs of one token's forward, if it is known
    (``costs`` is empty for a user's module).
    """

    counts: tuple[int, ...]
    costs: tuple[float, ...]
    layout: Layout

    @property
    def slowest(self) -> float:
        """Return the cost of the most costly stage over the mean of all stages."""
        return max(self.costs) * len(self.costs) / sum(self.costs)

    def __str__(self) -> str:
        """Return one line: the blocks that each pipeline rank holds, and their cost."""
        stages = all_stages(sum(self.counts), len(self.counts), self.counts)
        ranks = []
        unit, name = (1e9, "GFLOPs") if sum(self.costs) > 1e9 else (1e6, "MFLOPs")
        for rank in range(self.layout.pipeline):
            numbers = self.layout.stages_of(rank)
            blocks = " and ".join(_span(stages[number].blocks) for number in numbers)
            if not self.costs:
                ranks.append(blocks)
                continue
            ranks.append(f"{blocks} ({sum(self.costs[number] for number in numbers) / unit:,.3g})")
        if not self.costs:
            return f"blocks {', '.join(ranks)}"
        return (
            f"blocks {', '.join(ranks)} (in brackets: {name} of a token's forward, embedding and output "
            f"included); the slowest stage has {self.slowest:.2f} times the mean"
        )


def _span(blocks: Sequence[int]) -> str:
    return str(blocks[0]) if len(blocks) == 1 else f"{blocks[0]}-{blocks[-1]}"


def cut_stages(
    family: Family,
    config: ModelConfig,
    layout: Layout,
    sequence_length: int,
    *,
    split: Sequence[int] | None = None,
) -> StageCut:
    """Cut a model into the stages of a layout; ``BadInput`` for more stages than blocks or a bad split."""
    family = family.base if isinstance(family, AdaptedFamily) else family
    if isinstance(family, OwnFamily):  # whose code cuts it
        models: list[Any] = [*family.stages_on_meta(config, layout, split=split)]
        blocks_of = {part.number: len(part.blocks) for model in models for part in stage_parts(model)}
        return StageCut(tuple(blocks_of[number] for number in sorted(blocks_of)), (), layout)
    counts = split_blocks(config.num_hidden_layers, layout.stages, split)  # refuses what cannot be
    blocks, embedding, head = _forward_flops(family, config, sequence_length)
    if split is None:
        counts = cut_by_cost(blocks, layout.stages, first=embedding, last=head)
    costs = stage_costs(counts, blocks, first=embedding, last=head)
    return StageCut(tuple(counts), tuple(costs), layout)


@lru_cache(maxsize=64)
def _forward_flops(
    family: Family, config: ModelConfig, sequence_length: int
) -> tuple[list[float], float, float]:
    """Return the FLOPs of a token's forward: of each block, of the embedding, and of the output layer."""
    counted = flops_of_config(family, config, sequence_length)
    last = sum(part.forward for part in counted.last)
    return [part.forward for part in counted.blocks], counted.first.forward, last
