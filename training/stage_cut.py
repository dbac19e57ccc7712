"""Choose the blocks of each stage of a run: by hand, or so that the slowest stage is as fast as possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..layers import all_stages, split_blocks, stage_parts
from ..models import AdaptedFamily, Family, ModelConfig
from ..parallel_state import Layout
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
            here = [stages[number].blocks for number in numbers]
            blocks = " and ".join(f"{span[0]}-{span[-1]}" if span[1:] else str(span[0]) for span in here)
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


def cut_by_cost(blocks: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Return the number of blocks of each stage, at least one, so that the slowest stage is as fast as
    possible.

    Of such cuts it is the one whose stages are most alike (least sum of squares); of these, the first stages
    have least, because they hold the most micro-batches. ``blocks``: the cost of each block. ``first``,
    ``last``: the cost of the ends beside their blocks. Any unit.
    """
    assert 1 <= stages <= len(blocks), (stages, len(blocks))
    sums = [0.0]
    for cost in blocks:
        sums.append(sums[-1] + cost)

    even = [len(blocks) * (stage + 1) // stages - len(blocks) * stage // stages for stage in range(stages)]
    room = max(stage_costs(even, blocks, first=first, last=last))
    ends = [first * (stage == 0) + last * (stage == stages - 1) for stage in range(stages)]
    least = _best(sums, ends, room * (1 + 1e-12), squares=False)[0]
    return _best(sums, ends, least * (1 + 1e-12), squares=True)[1]


def stage_costs(
    counts: Sequence[int], blocks: Sequence[float], *, first: float = 0.0, last: float = 0.0
) -> list[float]:
    """Return the cost of each stage of a cut."""
    costs, start = [], 0
    for count in counts:
        costs.append(sum(blocks[start : start + count]))
        start += count
    costs[0] += first
    costs[-1] += last
    return costs


def _best(
    sums: Sequence[float], ends: Sequence[float], room: float, *, squares: bool
) -> tuple[float, list[int]]:
    """Return the least value of any cut whose stages cost at most ``room``, and that cut, computed from the
    last stage back to the first. The value is the sum of squares, or the largest cost. Of equal ones it is
    the cut whose first stages have least.

    ``sums[n]``: the cost of the first n blocks; ``ends``: what each stage costs beside its blocks.
    """
    blocks = len(sums) - 1
    after: dict[int, tuple[float, list[int]]] = {blocks: (0.0, [])}
    for stage in reversed(range(len(ends))):
        now: dict[int, tuple[float, list[int]]] = {}
        for start in range(stage, blocks) if stage else (0,):
            least, where, before = 0.0, -1, sums[start]
            for stop in range(start + 1, blocks + 1):
                cost = sums[stop] - before + ends[stage]
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
