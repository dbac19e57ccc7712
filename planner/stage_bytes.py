"""Compute what a stage of a rank keeps of a micro-batch, and in which order a backward goes through it."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ..layers import checkpointed
from ..simulation.piece import Piece
from ..simulation.trace import Trace
from .stage_costs import StageCost
from .step_shape import Work


class Run(NamedTuple):
    """State so many blocks, alike, that follow each other; ``trace``: what each keeps under checkpointing.

    ``ahead``: the bytes of the weights of the block before them, which a backward of theirs gathers ahead.
    """

    number: int
    piece: Piece
    trace: Trace
    ahead: float


class StageBytes:
    """Compute what one stage of a rank keeps of a micro-batch.

    ``kept``: the bytes from the forward to the backward. ``halfway``: those that the first part of a backward
    in two leaves to the second one, the gradients of what norms and products make. ``exit``: of ``kept`` what
    comes behind the blocks. ``first_part``: the most beside ``kept`` in the first part. ``runs``: the blocks
    that a backward comes to, in its order. ``largest``: the bytes of the largest block of the rank.
    """

    def __init__(
        self, stage: StageCost, work: Work, *, in_two: bool, own_input: bool, largest: float
    ) -> None:
        self.stage, self.cut, self.largest = stage, work.layout.pipeline > 1, largest
        mode, interval = work.checkpointing, work.checkpoint_every
        self.logits = stage.loss.kept if stage.loss is not None and not work.loss_chunk else 0

        def saved(number: int, piece: Piece) -> Trace:
            return piece.under(mode if checkpointed(number, mode, interval) else "none")

        blocks = [(piece, saved(number, piece)) for number, piece in stage.blocks.items()]
        reached = [pair for number, pair in zip(stage.blocks, blocks, strict=True) if number in stage.reached]
        self.unreached = [piece for number, piece in stage.blocks.items() if number not in stage.reached]
        further = [(piece, saved(number, piece)) for number, piece in stage.further.items()]
        # In ``stage.beside`` nothing of blocks of multi-token prediction is dropped.
        dropped = sum(piece.kept - trace.kept for piece, trace in further)
        self.exit = stage.behind.kept - dropped - sum(trace.kept for _, trace in further)
        self.kept = stage.beside.kept - dropped + sum(trace.kept for _, trace in reached)
        # Torch keeps a stage's output until the end of its backward: on a pipeline's last one the logits.
        self.output = self.cut * (self.logits or work.between_blocks)
        self.kept += self.output
        if self.cut and not stage.first and reached:
            # Autograd keeps what a stage is given, which may be the output of the stage before, also if the
            # first block does not.
            self.kept += work.between_blocks * (not own_input) - reached[0][1].kept_input
        self.runs = self._runs([*blocks, *further], len(reached) + len(further))
        self.further = len(further)
        self.gradients = sum(run.number * run.piece.gradients for run in self.runs)
        self.first_part, self.halfway = self._in_two(work) if in_two else (0.0, 0.0)

    def _runs(self, blocks: Sequence[tuple[Piece, Trace]], reached: int) -> list[Run]:
        # FSDP gathers ahead the block that ran before. Before a stage's first one nothing is gathered ahead,
        # but in a pipeline FSDP may gather a block of another stage of the rank.
        runs, place = list[Run](), len(blocks)
        for _, alike in groupby(reversed(blocks[len(blocks) - reached :]), key=lambda pair: id(pair[1])):
            pairs = [*alike]
            place -= len(pairs)
            ahead = blocks[place - 1][0].weights if place else self.largest * self.cut
            runs.append(Run(len(pairs), *pairs[0], ahead))
        return runs

    def _in_two(self, work: Work) -> tuple[float, float]:
        stage = self.stage
        if not stage.blocks:  # a user's module, whose stage is one piece
            return float(max(part.first_part for part in stage.beside.parts)), float(stage.beside.between)
        # The gradient of logits is written over them.
        most, waiting = 0, stage.beside.waiting - self.logits
        blocks = [run for run in self.runs if run.piece in stage.blocks.values()]
        for run in blocks:
            most = max(
                most, waiting + run.number * run.piece.waiting + run.piece.first_part - run.piece.waiting
            )
            waiting += run.number * run.piece.waiting
        # An RMSNorm of several operators has the gradients of its mean and of its square, in three steps.
        norm = 0 if work.batch.gpu else 4 * work.between_blocks
        halfway = stage.beside.between - self.logits + sum(run.number * run.piece.waiting for run in blocks)
        if stage.loss is None and blocks:
            # Behind the last block nothing waits for the second part, so its last operators are done.
            halfway -= blocks[0].piece.waiting - blocks[0].piece.between
        return max(most, waiting + norm), halfway
