"""Find the instants of a stage's actions that may need most memory, and what each needs."""

from bisect import bisect
from collections.abc import Iterator
from typing import NamedTuple

from ..layers import checkpointed
from ..pipeline.schedule_actions import Kind
from ..simulation.trace import Trace
from .shared_in_step import Place
from .stage_costs import Alike, StageCost
from .step_shape import Work


class Instant(NamedTuple):
    """State an instant of an action.

    ``bytes``: what it needs beside the kept activations, without gradients of weights. ``adding``: ``bytes``
    with one gradient of a weight that is then added to another. ``staying``: ``bytes`` with the gradients of
    the block's weights that are made by then, if these stay until the end of its backward. ``gathered``: the
    bytes of the blocks that are whole with ZeRO 3. ``absent``: the bytes of the blocks' gradients that are
    not made yet.
    """

    place: Place
    bytes: float
    adding: float
    staying: float
    gathered: float
    absent: float


def without_gradients(place: Place, size: float, absent: float = 0.0, *, gathered: float = 0.0) -> Instant:
    """Return an instant in which no weight's gradient is made."""
    return Instant(place, size, size, size, gathered, absent)


def in_block(
    place: Place, traced: Trace, freed: float, absent: float, *, gathered: float, counted: float = 0.0
) -> Instant:
    """Return an instant in a block, when ``freed`` bytes have been given back. ``counted``: the bytes of its
    gradients that ``shared_bytes`` counts at this place already.
    """
    staying = traced.with_gradients - counted - freed
    return Instant(place, traced.backward - freed, traced.with_gradient - freed, staying, gathered, absent)


class StageInstants:
    """Compute what one stage of a rank keeps of a micro-batch, and needs at each instant beside it.

    ``in_two``: whether a backward has two parts; ``own_input``: whether the stage before is on the same rank.
    ``largest``: the bytes of the largest block of any stage of the rank.
    ``kept``: the bytes from the forward to the backward. ``halfway``: those that the first part of a backward
    in two leaves to the second one, the gradients of what norms and products make. ``gradients``: the bytes
    of the gradients of the blocks' weights, in the dtype of compute.
    """

    def __init__(
        self, stage: StageCost, work: Work, *, in_two: bool, own_input: bool, largest: float
    ) -> None:
        self.stage, self.work, self.largest = stage, work, largest
        self.cut = work.layout.pipeline > 1
        self.logits = stage.loss.kept if stage.loss is not None and not work.loss_chunk else 0.0
        #: What each block that a backward reaches keeps and computes again.
        mode, checkpoint_every = work.checkpointing, work.checkpoint_every
        kinds = stage.alike(mode, checkpoint_every)
        self.unreached = [kind for kind in kinds if not kind.reached]
        self.reached = [
            (kind, kind.piece.under(mode if kind.forgets else "none")) for kind in kinds if kind.reached
        ]
        #: The same of blocks of multi-token prediction; in ``stage.beside`` nothing of them is dropped.
        self.further = [
            (piece, piece.under(mode if checkpointed(number, mode, checkpoint_every) else "none"))
            for number, piece in stage.further.items()
        ]
        self._further = sum(piece.gradients for piece, _ in self.further)
        self.gradients = self._further + sum(kind.count * kind.piece.gradients for kind, _ in self.reached)
        dropped = sum(piece.kept - saved.kept for piece, saved in self.further)
        self.exit = stage.behind.kept - dropped
        self.kept = stage.beside.kept - dropped + sum(kind.count * saved.kept for kind, saved in self.reached)
        # Torch keeps a stage's output until the end of its backward: on a pipeline's last one the logits.
        self.output = int(self.cut * (self.logits or work.between_blocks))
        self.kept += self.output
        if self.cut and not stage.first and self.reached:
            # Autograd keeps what a stage is given, which may be the output of the stage before, also if the
            # first block does not.
            first = min(self.reached, key=lambda each: each[0].numbers[0])[1]
            self.kept += work.between_blocks * (not own_input) - first.kept_input
        self.halfway = 0.0
        if in_two:
            self.halfway = stage.beside.between + sum(
                kind.count * kind.piece.waiting for kind, _ in self.reached
            )
            # The gradient of logits is written over them.
            self.halfway -= self.logits
            if stage.loss is None and self.reached:
                # Behind the last block nothing waits for the second part, so its last operators are done.
                last = max((kind for kind, _ in self.reached), key=lambda kind: kind.numbers[-1]).piece
                self.halfway -= last.waiting - last.between

        self._needs: dict[tuple[Kind, bool], list[Instant]] = {}

    def needs(self, kind: Kind, first: bool) -> list[Instant]:
        """Return the instants of an action. Blocks have no gradients yet only in the ``first`` backward."""
        if (kind, first) not in self._needs:
            self._needs[kind, first] = [*self._instants(kind, first)]
        return self._needs[kind, first]

    def _instants(self, kind: Kind, first: bool) -> Iterator[Instant]:
        stage, loss = self.stage, self.stage.loss
        if kind == "F" and loss is not None:
            working: float = max(loss.plain.forward, loss.plain.backward)
            working += 0 if self.cut and self.logits else loss.kept
            if not stage.blocks:  # one piece, in whose trace the loss is
                working = float(max(part.plain.forward for part in stage.beside.parts))
            yield without_gradients("loss", working, self.gradients * first)
        elif kind == "I":
            yield without_gradients("inputs", self._in_first_part(), gathered=2 * self.largest)
        elif kind == "W" and not stage.first:
            yield without_gradients("weights", 0.0)
            yield without_gradients("weights made", -self.halfway)
        elif kind == "W":  # the model's first stage computes all of its backward now
            names: dict[Place, Place] = {
                "last block": "unsummed last block", "block": "unsummed block", "entry": "unsummed end"
            }  # fmt: skip
            yield without_gradients("weights", 0.0)
            for instant in self._in_backward(first=False, unsummed=True):
                if instant.place in names:
                    yield instant._replace(place=names[instant.place], gathered=0.0)
        else:
            yield from self._in_backward(first)

    def _in_backward(self, first: bool, *, unsummed: bool = False) -> Iterator[Instant]:
        """Yield the instants of a whole backward: what it has given back counts as negative. ``unsummed``:
        whether the gradients of all blocks wait for its end.
        """
        absent: float = self.gradients * first
        last = max((kind.numbers[-1] for kind, _ in self.reached), default=-1)
        # FSDP gathers ahead the block that ran before the one whose backward runs.
        ahead = self._weights(max(self.stage.blocks, default=-1))
        behind = ahead
        if self.further:
            ahead = self.further[-1][0].weights
        if self.logits:
            head = self.work.whole + (0.0 if self.cut else self.logits)
            yield without_gradients("head", head, absent, gathered=ahead)
        behind_blocks = self.stage.behind
        if behind_blocks.parts:
            # ``shared_bytes`` counts the gradients of the root's weights at this place.
            most = behind_blocks.backward if self.stage.blocks else behind_blocks.with_gradient
            yield Instant("last block", behind_blocks.backward, most, most, ahead, absent)
        freed = 0.0
        for number, (piece, saved) in reversed([*enumerate(self.further)]):
            ahead = self.further[number - 1][0].weights if number else behind
            yield in_block("last block", saved, freed, absent, gathered=piece.weights + ahead)
            freed += saved.kept
            yield without_gradients("sum", -freed, absent, gathered=ahead)
            absent -= piece.gradients * first
        yield from self._in_unreached(first=first)
        for kind, saved in self.reached:
            if kind.numbers[-1] == last:
                yield from self._around_last_block(kind, saved, first=first)
            # Those in which most is kept. In the first backward gradients may be more than activations: then
            # the worst instant is late.
            later = [number for number in kind.numbers[-2:] if number != last][-1:]
            # A block of another kind before it may be larger.
            later += [number for number in kind.numbers if number - 1 not in kind.numbers][-1:]
            for number in {*later, *(kind.numbers[:2] if first else ())}:
                freed, absent = self._behind(number, first=first)
                ahead, counted = self._weights(number - 1), kind.piece.gradients * unsummed
                if first:
                    yield without_gradients("sum", -freed - saved.kept, absent, gathered=ahead)
                if number != last:
                    weights = kind.piece.weights
                    if weights > ahead:  # FSDP copies what it received before it gathers the block before
                        begin = self.work.between_blocks - freed
                        yield without_gradients("block", begin, absent, gathered=2 * weights)
                    gathered = weights + ahead
                    yield in_block("block", saved, freed, absent, gathered=gathered, counted=counted)
        entry = self.stage.entry
        yield without_gradients("entry", (0 if entry is None else entry.plain.backward) - self.kept)

    def _in_unreached(self, *, first: bool) -> Iterator[Instant]:
        """Yield the instants in blocks that no backward reaches, and that keep nothing of a micro-batch."""
        absent, begin = self.gradients * first, self.work.between_blocks - self.kept
        last = max((kind.numbers[-1] for kind in self.unreached), default=-1)
        for kind in self.unreached:
            # FSDP still has the last of them, which it has gathered for a backward that does not come.
            waits = max(self._weights(last) * (number != last) for number in kind.numbers)
            gathered = 2 * kind.piece.weights + waits
            # What its modules would keep is there while they run.
            made = kind.piece.kept + kind.piece.plain.forward
            yield without_gradients("forward", begin + made, absent, gathered=gathered)
            # And what it had received for the block before, until the weights are copied.
            before = max(self._weights(number - 1) for number in kind.numbers)
            yield without_gradients("forward", begin, absent, gathered=gathered + before)

    def _around_last_block(self, kind: Alike, saved: Trace, *, first: bool) -> Iterator[Instant]:
        """Yield the instants in the stage's last block that a backward reaches, and after it."""
        number, weights = kind.numbers[-1], kind.piece.weights
        freed, absent = self._behind(number, first=first)
        ahead = self._weights(number - 1)
        # In a pipeline the gradient of a stage's output is a message.
        message = self.work.between_blocks if self.cut and self.stage.loss is None else 0.0
        # Behind it may be a block of multi-token prediction, whose gradients have been summed.
        place: Place = "block" if self.further else "last block"
        yield in_block(place, saved, freed + message, absent, gathered=weights + ahead)
        yield without_gradients("sum", -freed - saved.kept, absent, gathered=ahead)
        # In the last block's forward what the stage gives is not there yet; then it is.
        made = max(kind.piece.plain.forward, self.work.between_blocks) - freed - self.output
        made = max(made, 0.0 if self.cut else self.logits)
        # FSDP keeps what it received for a block until it has gathered the next one.
        yield without_gradients("forward", made, self.gradients * first, gathered=2 * weights)
        yield without_gradients("first forward", made, self.gradients)

    def _weights(self, number: int) -> float:
        """Return the bytes of the weights of a block. Before a stage's first one nothing is gathered ahead,
        but in a pipeline FSDP may gather a block of another stage of the rank.
        """
        if number in self.stage.blocks:
            return self.stage.blocks[number].weights
        return self.largest * self.cut

    def _in_first_part(self) -> float:
        """Return the most bytes beside the kept activations in a backward's first part, which frees none.

        They are needed in a block, with the gradients that wait in the blocks behind it, or in the norm at
        the end.
        """
        if not self.stage.blocks:  # a user's module, whose stage is one piece
            return float(max(part.first_part for part in self.stage.beside.parts))
        # The gradient of logits is written over them.
        most, behind = 0.0, self.stage.beside.waiting - self.logits
        for kind, _ in self.reached:
            first = kind.numbers[0]
            after = (
                other.piece.waiting * (other.count - bisect(other.numbers, first))
                for other, _ in self.reached
            )
            most = max(most, behind + sum(after) + kind.piece.first_part)
        # An RMSNorm of several operators has the gradients of its mean and of its square, in three steps.
        norm = 0.0 if self.work.batch.gpu else 4 * self.work.between_blocks
        return max(most, behind + sum(kind.count * kind.piece.waiting for kind, _ in self.reached) + norm)

    def _behind(self, number: int, *, first: bool) -> tuple[float, float]:
        """Return the bytes that a micro-batch has given back when its backward comes to the block ``number``:
        those that the output layer and the blocks behind had kept. Then the bytes of the blocks' gradients
        that are not made yet, if this is the ``first`` backward.
        """
        freed, made = self.exit, self._further
        for kind, saved in self.reached:
            count = kind.count - bisect(kind.numbers, number)
            freed += count * saved.kept
            made += count * kind.piece.gradients
        return freed, (self.gradients - made) * first
