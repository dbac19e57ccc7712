"""Which blocks of a model live on a pipeline rank. A block keeps its global number in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..parallel_state import BadInput, ParallelState


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks ``start <= i < stop``; the first stage also embeds, the last also makes the logits."""

    start: int
    stop: int
    first: bool = True
    last: bool = True

    @property
    def blocks(self) -> range:
        return range(self.start, self.stop)

    @staticmethod
    def of(
        num_layers: int, *, split: Sequence[int] | None = None, state: ParallelState | None = None
    ) -> Stage:
        """The stage of this pipeline rank; ``split`` gives the number of blocks of each stage by hand."""
        state = state or ParallelState.alone()
        counts = split_blocks(num_layers, state.layout.pipeline, split)
        index = state.at.pipeline
        start = sum(counts[:index])
        return Stage(start, start + counts[index], index == 0, index == len(counts) - 1)


def split_blocks(num_layers: int, stages: int, split: Sequence[int] | None = None) -> list[int]:
    """How many blocks each stage has: as even as can be, the odd ones to the middle of the pipeline.

    The first and last stages also hold the embedding and the output layer, so they are the last to get one
    more. Raises ``BadInput`` where a stage would have no block, or ``split`` does not add up.
    """
    if split is not None:
        counts = list(split)
        if len(counts) != stages or sum(counts) != num_layers or min(counts, default=0) < 1:
            raise BadInput(
                "layout",
                "split",
                expected=f"{stages} counts of at least 1 that add up to {num_layers} blocks",
                found=counts,
            )
        return counts
    if stages > num_layers:
        raise BadInput(
            "layout",
            "pipeline",
            expected=f"at most {num_layers}, one block a stage",
            found=stages,
            todo=f"Nearest legal pipeline: {num_layers}",
        )
    least, extra = divmod(num_layers, stages)
    middle_first = sorted(range(stages), key=lambda s: abs(2 * s - (stages - 1)))
    return [least + (s in middle_first[:extra]) for s in range(stages)]
