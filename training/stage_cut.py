"""Choose the blocks of each stage of a run: by hand, or so that the slowest stage is as fast as possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any

from ..layers import all_stages, split_blocks, stage_parts
from ..models import AdaptedFamily, Family, ModelConfig
from ..parallel_state import Layout
from ..simulation.model_flops import flops_of_config
from .own_module import OwnFamily


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
            spans = [stages[number].blocks for number in numbers]
            blocks = " and ".join(f"{span[0]}-{span[-1]}" if span[1:] else str(span[0]) for span in spans)
            cost = f" ({sum(self.costs[number] for number in numbers) / unit:,.3g})" if self.costs else ""
            ranks.append(blocks + cost)
        line = f"blocks {', '.join(ranks)}"
        if not self.costs:
            return line
        return (
            f"{line} (in brackets: {name} of a token's forward, embedding and output included); "
            f"the slowest stage has {self.slowest:.2f} times the mean"
        )


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
    layout.check_blocks(config.num_hidden_layers)
    counts = split_blocks(config.num_hidden_layers, layout.stages, split)  # refuses what cannot be
    blocks = _forward_flops(family, config, sequence_length)
    if split is None:
        counts = cut_by_cost(blocks, layout.stages)
    return StageCut(tuple(counts), tuple(stage_costs(counts, blocks)), layout)


@lru_cache(maxsize=64)
def _forward_flops(family: Family, config: ModelConfig, sequence_length: int) -> list[float]:
    """Return the FLOPs of a token's forward of each block; with those of the embedding and the output layer,
    which are in the stages of the first and of the last one.
    """
    counted = flops_of_config(family, config, sequence_length)
    blocks = [part.forward for part in counted.blocks] or [0.0] * config.num_hidden_layers  # if none is known
    blocks[0] += counted.first.forward
    blocks[-1] += sum(part.forward for part in counted.last)
    return blocks


def cut_by_cost(blocks: Sequence[float], stages: int) -> list[int]:
    """Return the number of blocks of each stage, at least one, so that the slowest stage is as fast as
    possible.

    Of such cuts it is the one whose stages are most alike (least sum of squares); of these, the first stages
    have least, because they hold the most micro-batches. ``blocks``: the cost of each block, in any unit.
    """
    assert 1 <= stages <= len(blocks), (stages, len(blocks))
    sums = [0.0, *accumulate(blocks)]
    even = max(stage_costs(split_blocks(len(blocks), stages), blocks))
    least = _best(sums, stages, even * (1 + 1e-12), squares=False)[0]
    return _best(sums, stages, least * (1 + 1e-12), squares=True)[1]


def stage_costs(counts: Sequence[int], blocks: Sequence[float]) -> list[float]:
    """Return the cost of each stage of a cut."""
    rest_of_costs = iter(blocks)
    return [sum(islice(rest_of_costs, count)) for count in counts]


def _best(sums: Sequence[float], stages: int, room: float, *, squares: bool) -> tuple[float, list[int]]:
    """Return the least value of any cut whose stages cost at most ``room``, and that cut, computed from the
    last stage back to the first. The value is the sum of squares, or the largest cost. Of equal ones it is
    the cut whose first stages have least.

    ``sums[n]``: the cost of the first n blocks.
    """
    blocks = len(sums) - 1
    after: dict[int, tuple[float, list[int]]] = {blocks: (0.0, [])}
    for stage in reversed(range(stages)):
        now: dict[int, tuple[float, list[int]]] = {}
        for start in range(stage, blocks) if stage else (0,):
            least, where, before = 0.0, -1, sums[start]
            for stop in range(start + 1, blocks + 1):
                cost = sums[stop] - before
                if cost > room:
                    break
                if stop in after:
                    rest = after[stop][0]
                    value = cost**2 + rest if squares else max(cost, rest)
                    if where < 0 or value < least:
                        least, where = value, stop
            if where >= 0:
                now[start] = least, [where - start, *after[where][1]]
        after = now
    return after[0]
