"""Find the instants of a stage's actions that may need most memory, and what each needs."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from typing import NamedTuple

from ..layers import checkpointed
from ..pipeline.schedule_actions import Kind
from .activations import Saved, saved_under
from .shared_in_step import Place
from .stage_costs import StageCost
from .step_shape import Work


class Instant(NamedTuple):
    """State an instant of an action: the bytes that it needs beside the kept activations, the same with a
    gradient that is added, and how many blocks have no gradients yet.
    """

    place: Place
    bytes: float
    adding: float
    absent: int


class StageInstants:
    """Compute what one stage of a rank keeps of a micro-batch, and needs at each instant beside it.

    ``in_two``: whether a backward has two parts; ``given``: whether the stage before is on the same rank.
    ``kept``: the bytes from the forward to the backward. ``halfway``: those that the first part of a backward
    in two leaves to the second one, the gradients of what norms and products make.
    """

    def __init__(self, stage: StageCost, work: Work, *, in_two: bool, given: bool) -> None:
        self.stage, self.work = stage, work
        self.cut = work.layout.pipeline > 1
        self.logits = stage.loss.kept if stage.loss is not None and not work.loss_chunk else 0.0
        #: What each block that a backward reaches keeps and computes again.
        mode, every = work.checkpointing, work.checkpoint_every
        self.every = [
            (one, saved_under(mode if one.forgets else "none", one.cost, work))
            for one in stage.alike(mode, every)
            if one.reached
        ]
        self.blocks = len(stage.blocks)
        #: The same of blocks of multi-token prediction; in ``stage.beside`` nothing of them is dropped.
        self.further = [
            (cost, saved_under(mode if checkpointed(number, mode, every) else "none", cost, work))
            for number, cost in stage.further.items()
        ]
        dropped = sum(cost.kept - saved.kept for cost, saved in self.further)
        self.exit = stage.exit - dropped
        self.kept = stage.beside.kept - dropped + sum(one.count * saved.kept for one, saved in self.every)
        # Torch keeps a stage's output until the end of its backward: on a pipeline's last one the logits.
        self.given = self.cut * (self.logits or work.between_stages)
        self.kept += self.given
        if given:
            self.kept -= work.between_stages  # its input is the output of the stage before
        self.halfway = 0.0
        if in_two:
            self.halfway = stage.beside.outputs + sum(one.count * one.cost.outputs for one, _ in self.every)
            # The gradient of logits is written over them, if nothing else reads them.
            self.halfway -= self.logits * stage.overwrites

        self._needs: dict[tuple[Kind, bool], list[Instant]] = {}

    def needs(self, kind: Kind, first: bool) -> list[Instant]:
        """Return the instants of an action. Blocks have no gradients yet only in the ``first`` backward."""
        if (kind, first) not in self._needs:
            self._needs[kind, first] = [*self._instants(kind, first)]
        return self._needs[kind, first]

    def _instants(self, kind: Kind, first: bool) -> Iterator[Instant]:
        stage, loss = self.stage, self.stage.loss
        if kind == "F" and loss is not None:
            working = loss.working + (0.0 if self.cut and self.logits else loss.kept)
            yield Instant("loss", working, working, self.blocks * first)
        elif kind == "I":
            most = self._in_first_part()
            yield Instant("inputs", most, most, 0)
        elif kind == "W" and not stage.first:
            yield Instant("weights", 0.0, 0.0, 0)
            yield Instant("weights made", -self.halfway, -self.halfway, 0)
        elif kind == "W":  # the model's first stage computes all of its backward now
            names: dict[Place, Place] = {
                "last block": "unsummed last block", "block": "unsummed block", "entry": "unsummed end"
            }  # fmt: skip
            yield Instant("weights", 0.0, 0.0, 0)
            for place, size, adding, _ in self._in_backward(first=False):
                if place in names:
                    yield Instant(names[place], size, adding, 0)
        else:
            yield from self._in_backward(first)

    def _in_backward(self, first: bool) -> Iterator[Instant]:
        """Yield the instants of a whole backward: what it has given back counts as negative."""
        every = self.blocks * first
        if self.logits:
            head = self.work.tokens.bytes(self.work.hidden) + (0.0 if self.cut else self.logits)
            yield Instant("head", head, head, every)
        beside = self.stage.beside
        ends = [Saved(0.0, beside.working, max(beside.working, beside.with_gradient))]
        ends += [saved for _, saved in self.further]
        working = max(saved.recomputed for saved in ends)
        if working:
            yield Instant("last block", working, max(saved.with_gradient for saved in ends), every)
        last = max((one.numbers[-1] for one, _ in self.every), default=-1)
        for one, saved in self.every:
            freed, behind = self._freed(one.numbers[-1])
            left, done = every - behind * first, -freed - saved.kept
            sizes = saved.recomputed - freed, saved.with_gradient - freed
            if one.numbers[-1] != last:
                yield Instant("block", *sizes, left)
            else:
                # In a pipeline the gradient of a stage's output is a message.
                given = self.work.between_stages if self.cut and self.stage.loss is None else 0.0
                yield Instant("last block", sizes[0] - given, sizes[1] - given, left)
                yield Instant("sum", done, done, left)
                # In the last block's forward what the stage gives is not there yet; then it is.
                made = max(one.cost.making, self.work.between_blocks) - freed - self.given
                made = max(made, 0.0 if self.cut else self.logits)
                yield Instant("forward", made, made, left)
                yield Instant("first forward", made, made, self.blocks)
                if one.count > 1:
                    yield Instant("block", sizes[0] - saved.kept, sizes[1] - saved.kept, left - first)
            if first:  # gradients may be more than activations: then the worst instant is late
                freed, behind = self._freed(one.numbers[0])
                yield Instant("sum", -freed - saved.kept, -freed - saved.kept, every - behind)
                if one.count > 1:
                    yield Instant(
                        "block", saved.recomputed - freed, saved.with_gradient - freed, every - behind
                    )
        yield Instant("entry", -self.kept, -self.kept, 0)

    def _in_first_part(self) -> float:
        """Return the most bytes beside the kept activations in a backward's first part, which frees none.

        They are needed in a block, with what the blocks behind it leave, or in the norm at the end.
        """
        most, behind = 0.0, self.halfway - sum(one.count * one.cost.outputs for one, _ in self.every)
        for one, saved in self.every:
            first = one.numbers[0]
            after = (
                other.cost.outputs * (other.count - bisect(other.numbers, first)) for other, _ in self.every
            )
            most = max(most, behind + sum(after) + saved.recomputed)
        # An RMSNorm of several operators has the gradients of its mean and of its square, in three steps.
        norm = 0.0 if self.work.tokens.fused else 4 * self.work.between_blocks
        return max(most, self.halfway + norm)

    def _freed(self, number: int) -> tuple[float, int]:
        """Return the bytes that a micro-batch has given back when its backward comes to the block ``number``:
        what the output layer had kept, and the blocks behind it; and how many these are.
        """
        freed, behind = self.exit, 0
        for one, saved in self.every:
            count = one.count - bisect(one.numbers, number)
            freed += count * saved.kept
            behind += count
        return freed, behind
