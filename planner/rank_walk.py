"""Walk through the actions of a rank's step, block by block, and note the bytes at each instant.

FSDP handles a group of parameters at a time: a block, or the root, all that is in no block. In a backward it
gathers a group and, with ZeRO 3, the group before it. After the backward of a group it copies the gradients
into a buffer, which is summed; a shard of the sum stays. The buffer stays until the next group has its
gradients, so that of the last group stays until the next backward (``reduce_scatter_states`` in torch).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..parallel_state import BUFFER_DTYPE
from ..pipeline.held_in_step import Instant, heaviest, last_backwards
from ..simulation.piece import Piece
from .rank_parameters import RankParameters
from .stage_costs import Run, StageBytes, StageCost
from .step_shape import Work


def _most(pieces: Sequence[Piece], what: str) -> float:
    """Return the most bytes of a backward through pieces that run one after the other.

    It comes to the last one first, and gives back what this one kept before it comes to the others.
    """
    most = behind = 0
    for piece in reversed(pieces):
        most, behind = max(most, getattr(piece.plain, what) - behind), behind + piece.kept
    return most


class Peak(NamedTuple):
    """State the bytes at an instant: all of them, activations and messages, and what is not there: gradients
    that last and that no backward has made yet, and weights that are dropped already.
    """

    bytes: float
    resident: float
    messages: float
    missing: float
    dropped: float


class RankWalk:
    """Walk through what may be the worst instants of a rank's step; ``peaks``: in a loss, and elsewhere.

    ``stages``: those of the rank. ``gathered``: the bytes of the weights that it computes with, where these
    are not the stored ones. ``lasting``: those of gradients that last from one micro-batch to the next.
    """

    def __init__(self, work: Work, parameters: RankParameters, stages: Sequence[StageCost]) -> None:
        layout, total = work.layout, parameters.every
        self.work, self.parameters = work, parameters
        largest = max((piece.weights for stage in stages for piece in stage.blocks.values()), default=0.0)
        here = layout.stages_of(work.at.pipeline)
        self.stages = [
            stage.in_walk(work, own_input=number - 1 in here, largest=largest)
            for number, stage in zip(here, stages, strict=True)
        ]
        self.peaks: dict[bool, Peak] = {}
        zero, self.cut, several = layout.zero, layout.pipeline > 1, work.micro_batches > 1
        self.zero = zero
        #: Whether the weights are shared with no rank, and not by FSDP (``compute_weights``).
        self.alone = layout.holds_alone and not work.offload
        #: Whether each backward sums gradients over the data ranks, or the last one alone the sums of all.
        self.each = not self.alone and (zero >= 2 or not several)
        self.in_last = not self.alone and not self.each
        #: Bytes of a trained number: of its gradient as it is made, and as it lasts.
        self.made, self.sum = work.compute, work.reduce if several else work.master
        self.shard = (total.trained_stored / total.trained if total.trained else 0.0) * work.master
        # FSDP adds gradients to sums of another dtype only after the backward of their block.
        self.adds = not self.each and (self.alone or work.compute == work.reduce)
        ends = parameters.ends or (parameters.root,)
        self.root, self.last = max(end.trained for end in ends), max(end.last for end in ends)
        #: The buffer that the last sum of a backward leaves.
        self.buffer = (self.root or parameters.largest_trained_block) * work.reduce * (self.each and zero > 0)
        sharded = 0 if work.offload else total.trained * self.shard
        if self.each:
            self.lasting = sharded
        elif self.alone and not several:
            self.lasting = total.trained_stored * work.master
        else:
            self.lasting = total.trained * work.reduce + (sharded if work.offload else 0)
        self.gathered = self._gathered()
        # In a step's last backward gathered weights go with their block.
        gathers = zero in (1, 2) or (not zero and not self.alone and work.compute != work.master)
        self.drops = gathers and not self.cut

    def _gathered(self) -> float:
        work, total = self.work, self.parameters.every
        if self.zero or work.offload:
            return (total if self.zero < 3 else self.parameters.root).here * work.compute
        # Only those that are stored in another dtype, as the frozen weights beside adapters are not.
        frozen, stored = total.here - total.trained, total.fixed_bytes - total.buffers * BUFFER_DTYPE.itemsize
        cast = total.trained * (work.compute != work.master)
        return (cast + frozen * (stored != frozen * work.compute)) * work.compute

    def walk(self) -> None:
        """Walk through the actions at which the rank holds most, and through the last backwards."""
        work, layout, number = self.work, self.work.layout, self.work.at.pipeline
        here = layout.stages_of(number)
        whole, halfway = [stage.kept for stage in self.stages], [stage.halfway for stage in self.stages]
        message = work.between_blocks if self.cut else 0
        asked = work.schedule, layout, work.micro_batches, number, whole, halfway, message
        several = work.micro_batches > 1
        instants = [(instant, not several) for instant in heaviest(*asked)]
        if several and self.in_last:
            ends = last_backwards(*asked) if self.cut else [each for each, _ in instants if each.kind == "B"]
            instants += [(instant, True) for instant in ends]
        for instant, last in instants:
            place = here.index(instant.stage)
            self._begin(instant, message)
            if instant.kind == "F":
                self._loss(place)
            elif instant.kind == "I":
                self.note(self.stages[place].first_part + 2 * self.stages[place].largest * (self.zero == 3))
            elif instant.kind == "W" and not self.stages[place].stage.first:
                self._weights(place, last=last)
            else:
                self._backward(place, last=last, unsummed=instant.kind == "W")
        for place, stage in enumerate(self.stages):
            self._first_forward(place, stage)

    def note(self, beside: float, *, loss: bool = False) -> None:
        """Note the bytes of an instant: what is held now, and what is ``beside``."""
        size = self.now + beside + self.left - self.missing - self.dropped
        if loss not in self.peaks or size > self.peaks[loss].bytes:
            self.peaks[loss] = Peak(
                size, self.resident, self.messages, self.missing - self.before, self.dropped
            )

    def _begin(self, instant: Instant, message: float) -> None:
        # Of a module that is not the zoo's it is not known when its gradients appear.
        self.absent = instant.absent if all(stage.stage.blocks for stage in self.stages) else ()
        self.messages = instant.messages * message
        self.resident = self.now = instant.bytes
        self.dropped = 0.0
        parameters, places = self.parameters, range(len(self.stages))
        first = len(self.absent) == len(places)
        self.missing = self._lasting(sum(self.stages[place].gradients for place in self.absent))
        self.made_root = first * self._lasting(parameters.root.trained * self.made)
        self.missing += self.made_root
        self.before = self.left = 0.0 if first else self.buffer * (self.work.micro_batches > 1)

    def _lasting(self, gradients: float) -> float:
        """Return how many bytes last of so many bytes of gradients as they are made."""
        each = (0.0 if self.work.offload else self.shard) if self.each else self.sum
        return gradients / self.made * each

    def _loss(self, place: int) -> None:
        stage, loss = self.stages[place].stage, self.stages[place].stage.loss
        assert loss is not None
        working = max(loss.plain.forward, loss.plain.backward)
        working += 0 if self.cut and self.stages[place].logits else loss.kept
        if not stage.blocks:  # one piece, in whose trace the loss is
            working = max(part.plain.forward for part in stage.beside)
        self.note(working, loss=True)

    def _first_forward(self, place: int, stage: StageBytes) -> None:
        """Note the forward of a step's first micro-batch, for which ZeRO 1 and 2 gather."""
        if self.zero in (1, 2) and stage.runs:
            self.messages = self.dropped = self.left = self.before = 0.0
            self.missing, self.resident, self.now = self.lasting, stage.kept, stage.kept
            ahead = self.parameters.largest_block * self.made
            self.note(self._made_in_last(stage) + ahead)

    def _made_in_last(self, stage: StageBytes) -> float:
        """Return the bytes beside the kept ones in the forward of a stage's last block."""
        # In the last block's forward what the stage gives is not there yet; then it is.
        run = next((run for run in stage.runs if run.piece in stage.stage.blocks.values()), None)
        made = 0 if run is None else max(run.piece.plain.forward, self.work.between_blocks)
        return max(made - stage.exit - stage.output, 0 if self.cut else stage.logits)

    def _weights(self, place: int, *, last: bool) -> None:
        """Walk through the second part of a backward in two, which computes the gradients of weights."""
        parameters, largest = self.parameters, self.parameters.largest_trained_block
        self.now += self._whole(place)
        self.note(max(parameters.root.here, parameters.largest_block) * self.made * (self.zero == 3))
        self.now -= self.stages[place].halfway
        if self.each:
            self.left = 0.0
            trained = parameters.sums_of_stages[place][1] + self._exit(place)
            self.note(trained * self.made + largest * self.work.reduce)
        else:
            self.note(largest * (self.work.reduce if last and self.in_last else self.made))

    def _whole(self, place: int) -> float:
        """Return the bytes of a stage's blocks, which the second part of a backward gathers all at once."""
        return self.parameters.sums_of_stages[place][0] * self.made * (self.zero == 3)

    def _exit(self, place: int) -> float:
        """Return the trained elements of the root that the model's last stage uses."""
        return self.parameters.exit * (place == len(self.stages) - 1)

    def _backward(self, place: int, *, last: bool, unsummed: bool) -> None:
        """Walk through a whole backward. ``unsummed``: whether the gradients of all blocks wait for its
        end.
        """
        stage, work, exit = self.stages[place], self.work, self._exit(place)
        zero3 = self.zero == 3 and not unsummed
        if unsummed:
            self.now += self._whole(place)
        summing, first = self.each or (last and self.in_last), place in self.absent
        if not unsummed:
            self._forwards(stage)
        stays = first and not self.each
        ahead = stage.runs[0].piece.weights if stage.runs else stage.largest
        # The gradients of the output layer wait for the root's, and a tied weight's for its second part.
        waits = (exit if self.each else self.parameters.tied) * self.made
        if stays:
            self.missing -= (early := min(max(exit - self.parameters.tied, 0) * self.sum, self.made_root))
            self.made_root -= early
        if stage.logits and not unsummed:
            head = 0.0 if stays else exit * self.made
            self.note(work.whole + (0 if self.cut else stage.logits) + head + zero3 * ahead)
        if behind := stage.stage.behind:
            end = _most(behind, "backward")
            if not stage.stage.blocks:
                most = end + self.parameters.largest_of_blocks * self.made
                end = max(_most(behind, "with_gradient"), most)
                ahead = 2 * self.parameters.largest_block * self.made
            self.note(end + waits + zero3 * ahead)
        message = work.between_blocks if self.cut and stage.stage.loss is None else 0
        for number, run in enumerate(stage.runs):
            self.now -= stage.exit * (number == stage.further)
            self._blocks(run, first, summing and not unsummed, waits, message, drops=last and self.drops)
            message = 0
        entry = stage.stage.entry
        self.now = self.resident - stage.kept + (stage.gradients * self.each + self._whole(place)) * unsummed
        self._root(waits, first, summing, 0 if entry is None else entry.plain.backward)

    def _blocks(
        self, run: Run, first: bool, summing: bool, waits: float, message: float, *, drops: bool
    ) -> None:
        """Walk through the backward of blocks that are alike: the first two, and the last one. ``waits``: the
        bytes of gradients that wait for a sum; ``message``: of the gradient that came to the first block.
        """
        trace, weights, grads = run.trace, run.piece.weights, run.piece.gradients
        zero3 = (self.zero == 3) * (summing or not self.each)
        most = trace.with_gradient if self.adds and not first else trace.with_gradients
        lasting = self._lasting(grads) * first
        unsummed = grads * (self.each and not summing)
        buffer = grads / self.made * self.work.reduce
        summed = self._summed(grads / self.made, self.parameters.largest_of_blocks)
        left = buffer * (self.each and self.zero > 0)
        start, missing, dropped, before = self.now, self.missing, self.dropped, self.left
        for index in sorted({0, min(1, run.number - 1), run.number - 1}):
            self.now = start - index * (trace.kept - unsummed)
            self.missing, self.dropped = missing - index * lasting, dropped + index * weights * drops
            self.left = left if index and summing else before
            ahead = weights if index < run.number - 1 else run.ahead
            self.note(most - message * (not index) + waits + zero3 * (weights + ahead))
            if weights > ahead:  # FSDP copies what it received before it gathers the block before
                self.note(self.work.between_blocks + waits + zero3 * 2 * weights)
            self.now -= trace.kept - unsummed
            self.dropped += weights * drops
            if summing:
                self.left = 0.0
                self.note(summed + waits + zero3 * ahead)
                self.left = left
            self.missing -= lasting

    def _summed(self, elements: float, last: float) -> float:
        """Return the most bytes while the gradients of a group are summed, those of its weights included."""
        buffer, shard = elements * self.work.reduce, elements * self.shard * (self.zero > 0)
        # The gradients are freed before the shard is made, but for one. Without ZeRO the buffer stays.
        return buffer + max(elements, shard / self.made + last) * self.made * self.each

    def _forwards(self, stage: StageBytes) -> None:
        """Note the forwards of a micro-batch in the last block, and in blocks that no backward comes to."""
        zero3, weights = self.zero == 3, stage.runs[0].piece.weights if stage.runs else 0
        # FSDP keeps what it received for a block until it has gathered the next one.
        self.note(self._made_in_last(stage) + zero3 * 2 * weights)
        for piece in dict.fromkeys(stage.unreached):  # which keeps nothing
            # FSDP has the last of them, which it has gathered for a backward that does not come; and what it
            # received for the block before, until the weights are copied.
            made = max(piece.kept + piece.plain.forward, zero3 * stage.largest)
            self.note(self.work.between_blocks - stage.kept + made + zero3 * 3 * stage.largest)

    def _root(self, waits: float, first: bool, summing: bool, backward: float) -> None:
        """Walk through the end of a backward: the embedding, and the sum of the root's gradients."""
        made, parameters = self.made, self.parameters
        # Autograd adds the two parts of a tied weight's gradient into a third tensor.
        joined = 3 * parameters.tied * made
        if self.each:
            self.note(max(backward + waits, joined))
            self.left = 0.0
            self.note(self._summed(self.root, self.last))
        elif first:
            self.missing -= min(self.made_root, self.missing)
            self.note(max(backward, joined - parameters.tied * self.sum))
        else:
            self.note(
                max(backward + self.root * made * self.alone, joined, self.root * self.work.reduce * summing)
            )
