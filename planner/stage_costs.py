"""Hold the traced pieces of each pipeline stage of a rank, and what these keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from ..layers import Checkpointing, checkpointed
from ..parallel_state import Layout
from ..simulation.trace import Piece, Trace
from .remembered import remembered
from .step_shape import Work


class Alike(NamedTuple):
    """Describe equal blocks of a stage: how many (``blocks``), the ``number`` of the first, and their piece.

    ``mode``: of their activation checkpointing; ``reached``: whether a backward comes to them.
    """

    number: int
    blocks: int
    piece: Piece
    mode: Checkpointing
    reached: bool


@dataclass(frozen=True, eq=False)
class StageCost:
    """Hold the pieces of one stage for one micro-batch.

    ``first``: whether it is the model's first stage. ``blocks`` may be recomputed in backward, and have their
    global numbers; ``beside`` is everything else but the loss. ``reached``: the blocks that a backward comes
    to; it ends at the first trained parameter. Stages that are alike may share one object, with the numbers
    of one of them.
    """

    first: bool
    blocks: Mapping[int, Piece]
    beside: tuple[Piece, ...]
    reached: frozenset[int]
    #: Of ``beside``: on the first stage what comes before the blocks.
    entry: Piece | None = None
    #: On the last stage; of ``beside`` what comes behind the blocks: the last norm, the output layer and the
    #: blocks of multi-token prediction, which are also here by number, because they may be recomputed.
    loss: Piece | None = None
    behind: tuple[Piece, ...] = ()
    further: Mapping[int, Piece] = field(default_factory=dict)
    #: Of a user's module: whether it is the rank's first stage, with which all blocks of the rank are timed.
    leads: bool = False
    _bytes: dict[object, StageBytes] = field(default_factory=dict, init=False, repr=False)

    @property
    def has_backward(self) -> bool:
        """Tell whether a backward comes to the stage: to a block, or to the end of the model."""
        return bool(self.reached) or self.loss is not None or not self.blocks

    def in_walk(self, work: Work, *, gathers: bool, own_input: bool, largest: float) -> StageBytes:
        """Return what the stage keeps; see ``StageBytes``. Steps of many layouts ask for the same."""
        gathers = gathers and work.in_two
        mode = work.checkpointing, work.checkpoint_every, work.layout.pipeline > 1, work.in_two
        key = *mode, gathers, own_input, largest
        if key not in self._bytes:
            self._bytes[key] = StageBytes(self, work, gathers=gathers, own_input=own_input, largest=largest)
        return self._bytes[key]

    @remembered
    def alike(self, mode: Checkpointing, checkpoint_every: int) -> list[Alike]:
        """Return one block of each kind; blocks that share a piece are alike, if checkpointing treats them
        alike.
        """
        kinds: dict[tuple[Piece, Checkpointing, bool], list[int]] = {}
        for number, piece in self.blocks.items():
            block_mode: Checkpointing = mode if checkpointed(number, mode, checkpoint_every) else "none"
            kinds.setdefault((piece, block_mode, number in self.reached), []).append(number)
        return [Alike(numbers[0], len(numbers), *key) for key, numbers in kinds.items()]


class Run(NamedTuple):
    """Describe consecutive equal blocks: how many (``number``), their piece, and its ``trace`` under the
    recipe's activation checkpointing.

    ``block``: the number of one of them. ``ahead``: the bytes of the weights of the block before them, which
    their backward prefetches.
    """

    number: int
    block: int
    piece: Piece
    trace: Trace
    ahead: float


class StageBytes:
    """Compute what one stage of a rank keeps of a micro-batch.

    ``kept``: the bytes from the forward to the backward. ``halfway``: those that the first part of a backward
    in two leaves to the second one, the gradients of what norms and products make. ``exit``: of ``kept`` what
    the last norm and the output layer keep. ``first_part``: the most beside ``kept`` in the first part, with
    what FSDP ``gathers`` with ZeRO 3.
    ``runs``: the blocks that a backward comes to, in its order. ``largest``: the bytes of the largest block
    of the rank; ``own_input``: whether the stage before is the rank's own.
    """

    def __init__(
        self, stage: StageCost, work: Work, *, gathers: bool, own_input: bool, largest: float
    ) -> None:
        self.stage, self.cut, self.largest = stage, work.layout.pipeline > 1, largest
        mode, interval = work.checkpointing, work.checkpoint_every
        self.logits = stage.loss.plain.kept if stage.loss is not None and not work.loss_chunk else 0

        def saved(number: int, piece: Piece) -> Trace:
            return piece.under(mode if checkpointed(number, mode, interval) else "none")

        blocks = [(number, piece, saved(number, piece)) for number, piece in stage.blocks.items()]
        reached = [block for block in blocks if block[0] in stage.reached]
        self.unreached = [piece for number, piece in stage.blocks.items() if number not in stage.reached]
        further = [(number, piece, saved(number, piece)) for number, piece in stage.further.items()]
        self.exit = stage.behind[0].plain.kept if stage.behind else 0
        # Of ``stage.beside`` blocks of multi-token prediction may drop something, too.
        plain = [piece.plain for piece in stage.beside if piece not in stage.further.values()]
        self.kept = sum(trace.kept for trace in (*plain, *(trace for *_, trace in (*reached, *further))))
        # Torch keeps what a stage sends until the end of its backward. Logits wait for their gradient.
        self.output = self.cut * (self.logits or work.between_blocks * (stage.loss is None))
        self.kept += self.output
        if self.cut and not stage.first and reached:
            # Autograd keeps what a stage is given, which may be the output of the stage before, also if the
            # first block does not.
            self.kept += work.between_blocks * (not own_input) - reached[0][2].kept_input
        self.runs = self._runs([*blocks, *further], len(reached) + len(further))
        self.further = len(further)
        self.first_part, self.halfway = self._in_two(work, gathers) if work.in_two else (0.0, 0.0)
        #: The pieces of a backward in two in the order of its second part, how many are alike, and the number
        #: of a block.
        self.in_two = [(run.piece, run.number, run.block) for run in reversed(self.runs)]
        self.in_two += [(piece, 1, -1) for piece in stage.behind if piece not in stage.further.values()]

    def _runs(self, blocks: Sequence[tuple[int, Piece, Trace]], reached: int) -> list[Run]:
        # FSDP gathers ahead the block that ran before, of the same stage (``ForwardOrder``).
        runs, place = list[Run](), len(blocks)
        for _, same in groupby(reversed(blocks[len(blocks) - reached :]), key=lambda block: id(block[2])):
            run = [*same]
            place -= len(run)
            # Of a block with experts apart it gathers these later.
            before = blocks[place - 1][1].plain if place else None
            ahead = 0 if before is None else before.weights - before.apart
            runs.append(Run(len(run), *run[0], ahead))
        return runs

    def _in_two(self, work: Work, gathers: bool) -> tuple[float, float]:
        stage = self.stage
        if not stage.blocks:  # a user's module, whose stage is one piece
            first_part = max(part.in_two.first_part for part in stage.beside) + 2 * self.largest * gathers
            return float(first_part), float(sum(piece.in_two.between for piece in stage.beside))
        most, weights, waiting = 0.0, 0, sum(piece.in_two.waiting for piece in stage.beside)
        # The gradient of logits is written over them, and waits only for that of the output layer's weights.
        waiting -= self.logits * (waiting >= self.logits)
        blocks = [run for run in self.runs if run.piece in stage.blocks.values()]
        for run in blocks:
            weights = run.trace.weights * gathers
            for index in {max(run.number - 2, 0), run.number - 1}:
                before = waiting + index * run.piece.in_two.waiting
                ahead = weights if index < run.number - 1 else run.ahead * gathers
                # FSDP copies what it received before it gathers the block before.
                most = max(most, before + 2 * weights, before + run.piece.in_two.first_part + weights + ahead)
            waiting += run.number * run.piece.in_two.waiting
        # An RMSNorm of several operators has the gradients of its mean and of its square, in three steps.
        norm = 0 if work.batch.gpu else 4 * work.between_blocks
        halfway = sum(piece.in_two.between for piece in stage.beside) - self.logits
        halfway += sum(run.number * run.piece.in_two.waiting for run in blocks)
        if stage.loss is None and blocks:
            # Behind the last block nothing waits for the second part, so its last operators are done.
            halfway -= blocks[0].piece.in_two.waiting - blocks[0].piece.in_two.between
        return max(most, waiting + norm + weights), halfway


def most_of(pieces: Sequence[Piece], what: str) -> float:
    """Return the most bytes of a backward through pieces that run one after the other.

    It comes to the last one first, and gives back what this one kept before it comes to the others.
    """
    most = behind = 0
    for piece in reversed(pieces):
        most, behind = max(most, getattr(piece.plain, what) - behind), behind + piece.plain.kept
    return most


def alike_ranks(layout: Layout, costs: Callable[[int], Sequence[StageCost]]) -> list[int]:
    """Return, for each pipeline rank, the first one with stages that cost the same, and of which the same
    follow each other. ``costs``: returns those of a rank.
    """
    first: dict[object, int] = {}
    ranks = [(rank, layout.stages_of(rank)) for rank in range(layout.pipeline)]
    keys = [(*costs(rank), *(number - 1 in stages for number in stages)) for rank, stages in ranks]
    return [first.setdefault(key, rank) for rank, key in enumerate(keys)]
