"""Place the blocks of a model on pipeline ranks. A block keeps its global number in every layout."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Self

from torch import nn

from ..parallel_state import Layout, ParallelState, alone_or, refuse_layout
from ..system import counted


@dataclass(frozen=True, slots=True)
class Stage:
    """List the ``blocks`` of a pipeline stage; the first one also embeds, the last one makes the logits.

    A ``Stage`` also describes all blocks of one rank. If a rank holds several stages of the model, they are
    the ``parts`` of its ``Stage``, in the model's order; between two of them other ranks compute.
    """

    blocks: tuple[int, ...]
    first: bool = True
    last: bool = True
    number: int = 0
    pieces: tuple[Self, ...] = ()

    @property
    def parts(self) -> tuple[Self, ...]:
        """Return the stages that run one at a time: the stage itself, if it is a single one."""
        return self.pieces or (self,)

    @staticmethod
    def of(
        num_layers: int, *, split: Sequence[int] | None = None, state: ParallelState | None = None
    ) -> "Stage":
        """Return the stage of this pipeline rank; ``split``: the number of blocks of each stage, by hand."""
        state = alone_or(state)
        state.layout.check_blocks(num_layers)
        stages = tuple(split_blocks(num_layers, state.layout.stages, split))
        return _of_rank(stages, state.layout.stages_of(state.at.pipeline))


def all_stages(num_layers: int, stages: int, split: Sequence[int] | None = None) -> tuple[Stage, ...]:
    """Return every stage of a model in its order; each block is in exactly one."""
    return _all_stages(tuple(split_blocks(num_layers, stages, split)))


@lru_cache(maxsize=64)
def _all_stages(counts: tuple[int, ...]) -> tuple[Stage, ...]:
    """Return the stages of these numbers of blocks; each rank of a pipeline asks for all of them."""
    ends, last = [0, *accumulate(counts)], len(counts) - 1
    bounds = enumerate(pairwise(ends))
    return tuple(Stage(tuple(range(*run)), number == 0, number == last, number) for number, run in bounds)


@lru_cache(maxsize=4096)  # a plan of many layouts asks for each many times
def _of_rank(counts: tuple[int, ...], numbers: tuple[int, ...]) -> Stage:
    """Return the stage of a rank that holds the stages ``numbers``, of these numbers of blocks."""
    stages = _all_stages(counts)
    parts = tuple(stages[number] for number in numbers)
    if len(parts) == 1:
        return parts[0]
    blocks = tuple(block for part in parts for block in part.blocks)
    return Stage(
        blocks, any(p.first for p in parts), any(p.last for p in parts), parts[0].number, pieces=parts
    )


def split_blocks(num_layers: int, stages: int, split: Sequence[int] | None = None) -> list[int]:
    """Return the number of blocks of each stage, as even as possible, with the larger ones in the middle.

    The first and the last stage also hold the embedding and the output layer, so they are the last to get one
    block more. Raises ``BadInput`` if a stage would have no block, or if ``split`` does not add up.
    """
    if split is not None:
        counts = list(split)
        if len(counts) != stages or sum(counts) != num_layers or min(counts, default=0) < 1:
            expected = f"{counted(stages, 'count')} of at least 1 that add up to {num_layers} blocks"
            refuse_layout("split", expected, counts)
        return counts
    Layout(pipeline=stages).check_blocks(num_layers)
    least, extra = divmod(num_layers, stages)
    middle_first = sorted(range(stages), key=lambda s: abs(2 * s - (stages - 1)))
    return [least + (s in middle_first[:extra]) for s in range(stages)]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """List a model's blocks: the members of its ``ModuleList``, ``ModuleDict`` and ``Sequential`` modules.

    Only members with parameters count, and lists inside no other list. Without one there are none.
    """
    blocks = []
    for child in model.children():
        has_forward = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if has_forward and isinstance(model, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            blocks += [child] if next(child.parameters(), None) is not None else []
        else:
            blocks += find_blocks(child)
    return [*dict.fromkeys(blocks)]


def unshared_blocks(model: nn.Module, blocks: Iterable[nn.Module] | None = None) -> list[nn.Module]:
    """Return those of the blocks (default: ``find_blocks``) that share no parameter with what is beside them.

    FSDP can gather these by themselves; a parameter of several blocks it must gather with the model. A block
    may hold others, whose parameters are theirs alone.
    """
    blocks = find_blocks(model) if blocks is None else [*blocks]
    own = {block: _parameters_beside(block, {*blocks} - {block}) for block in blocks}
    holders = Counter(parameter for parameters in own.values() for parameter in parameters)
    holders.update(_parameters_beside(model, {*blocks}))
    return [block for block in blocks if all(holders[parameter] == 1 for parameter in own[block])]


def _parameters_beside(module: nn.Module, blocks: Container[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of a module that a way through none of these blocks leads to."""
    if module in blocks:
        return set()
    return {*module.parameters(recurse=False)}.union(
        *(_parameters_beside(child, blocks) for child in module.children())
    )


def stage_parts(model: Any) -> tuple[Stage, ...]:
    """Return the stages of the model that a module holds, or one that is all of it."""
    stage = getattr(model, "stage", None)
    return stage.parts if isinstance(stage, Stage) else (Stage(tuple(range(len(find_blocks(model))))),)


def numbered_blocks(model: Any) -> dict[int, nn.Module]:
    """Return a module's blocks by their numbers over the whole model: those that it says itself, or else its
    members in order, with the numbers of its stages.
    """
    if hasattr(model, "numbered_blocks"):
        own: dict[int, nn.Module] = model.numbered_blocks()
        return own
    blocks = find_blocks(model)
    numbers = [number for part in stage_parts(model) for number in part.blocks]
    if len(numbers) != len(blocks):
        numbers = [*range(len(blocks))]
    return dict(zip(numbers, blocks, strict=True))
