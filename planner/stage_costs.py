"""Gather the traced pieces of a rank's model for each of its pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch import nn

from ..layers import Checkpointing, Stage, checkpointed
from ..simulation.kinds_of_blocks import signature
from ..simulation.piece import Piece
from ..simulation.pieces import ModelPieces
from .step_shape import Work

if TYPE_CHECKING:
    from ..models import CausalLM


@dataclass(frozen=True, slots=True)
class Alike:
    """State the piece of blocks that are alike, and their ``numbers`` in order.

    ``forgets``: whether checkpointing drops what they keep; ``reached``: whether a backward comes to them.
    """

    numbers: tuple[int, ...]
    piece: Piece
    forgets: bool
    reached: bool

    @property
    def number(self) -> int:
        """Return the number of the first one."""
        return self.numbers[0]

    @property
    def count(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class Pieces:
    """Add up pieces that run one after the other; see ``Trace`` and ``Piece``.

    A backward comes to the last one first, and gives back what this one kept before it comes to the others.
    """

    parts: tuple[Piece, ...]

    @cached_property
    def kept(self) -> int:
        return sum(part.kept for part in self.parts)

    @cached_property
    def backward(self) -> int:
        return self._most([part.plain.backward for part in self.parts])

    @cached_property
    def with_gradient(self) -> int:
        return self._most([part.plain.with_gradient for part in self.parts])

    def _most(self, sizes: Sequence[int]) -> int:
        most, behind = 0, 0
        for size, part in zip(reversed(sizes), reversed(self.parts), strict=True):
            most, behind = max(most, size - behind), behind + part.kept
        return most

    @cached_property
    def between(self) -> int:
        return sum(part.between for part in self.parts)

    @cached_property
    def waiting(self) -> int:
        return sum(part.waiting for part in self.parts)


@dataclass(frozen=True)
class StageCost:
    """Hold the pieces of one stage for one micro-batch.

    ``first``: whether it is the model's first stage. ``blocks`` may be recomputed in backward, and have their
    global numbers; ``beside`` is everything else but the loss. ``reached``: the blocks that a backward comes
    to; it ends at the first trained parameter. Stages that are alike may share one object, with the numbers
    of one of them.
    """

    first: bool
    blocks: Mapping[int, Piece]
    beside: Pieces
    reached: frozenset[int]
    #: Of ``beside``: on the first stage what comes before the blocks.
    entry: Piece | None = None
    #: On the last stage; of ``beside`` what comes behind the blocks: the last norm, the output layer and the
    #: blocks of multi-token prediction, which are also here by number, because they may be recomputed.
    loss: Piece | None = None
    behind: Pieces = Pieces(())
    further: Mapping[int, Piece] = field(default_factory=dict)
    #: Of a user's module: whether it is the rank's first stage, with which all blocks of the rank are timed.
    leads: bool = False
    _alike: dict[tuple[Checkpointing, int], list[Alike]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def before_trained(self) -> tuple[int, ...]:
        """Return the numbers of the blocks that no backward comes to, in order."""
        return tuple(number for number in self.blocks if number not in self.reached)

    @property
    def has_backward(self) -> bool:
        """Tell whether a backward comes to the stage: to a block, or to the end of the model."""
        return bool(self.reached) or self.loss is not None or not self.blocks

    def alike(self, mode: Checkpointing, checkpoint_every: int) -> list[Alike]:
        """Return one block of each kind; blocks that share a piece are alike, if checkpointing treats them
        alike.
        """
        if (mode, checkpoint_every) not in self._alike:
            kinds: dict[tuple[int, bool, bool], list[int]] = {}
            for number, piece in self.blocks.items():
                key = id(piece), checkpointed(number, mode, checkpoint_every), number in self.reached
                kinds.setdefault(key, []).append(number)
            self._alike[mode, checkpoint_every] = [
                Alike(tuple(numbers), self.blocks[numbers[0]], forgets, reached)
                for (_, forgets, reached), numbers in kinds.items()
            ]
        return self._alike[mode, checkpoint_every]


def stage_costs(work: Work, model: CausalLM) -> list[StageCost]:
    """Return the pieces of each stage that a rank holds of a model, which may be on the meta device."""
    pieces = ModelPieces(model, work.state)
    kinds = {number: signature(model.layers[str(number)]) for number in model.stage.blocks}
    blocks = {number: model.layers[str(number)] for number in model.stage.blocks}
    return [stage_cost(work, part, blocks, kinds, pieces) for part in model.stage.parts]


def stage_cost(
    work: Work,
    stage: Stage,
    blocks: Mapping[int, nn.Module],
    kinds: Mapping[int, object],
    pieces: ModelPieces,
) -> StageCost:
    """Return the pieces of one stage of a rank, from its ``blocks`` and their ``kinds`` by number."""
    batch, model = work.batch, pieces.model
    # Every later stage sends gradients back, trained or not: torch's stages do.
    reached = not stage.first or _trained(*model.entry)
    block_pieces, reaches = dict[int, Piece](), set[int]()
    for number in stage.blocks:
        block_pieces[number] = pieces.block(blocks[number], batch, reached=reached, kind=kinds[number])
        reached = reached or _trained(blocks[number])
        if reached:
            reaches.add(number)
    first_of = {kinds[number]: blocks[number] for number in reversed(stage.blocks)}
    entry = pieces.entry(batch) if stage.first else None
    parts = [pieces.tables(first_of, batch), *([entry] if entry else [])]
    if not stage.last:
        return StageCost(stage.first, block_pieces, Pieces(tuple(parts)), frozenset(reaches), entry)
    in_loss = bool(work.loss_chunk)
    end = pieces.exit(batch, reached=reached, in_loss=in_loss)
    reached = reached or _trained(model.norm, model.embed)
    further = {
        int(name): pieces.prediction(place, batch, reached=reached) for place, name in enumerate(model.mtp)
    }
    loss = pieces.loss(batch, chunk=work.loss_chunk, sums=work.loss_sums)
    behind = Pieces((end, *further.values()))
    beside = Pieces((*parts, *behind.parts))
    return StageCost(stage.first, block_pieces, beside, frozenset(reaches), entry, loss, behind, further)


def _trained(*modules: nn.Module) -> bool:
    return any(weight.requires_grad for module in modules for weight in module.parameters())
