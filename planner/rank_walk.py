"""Walk through the actions of a rank's step, block by block, and note the bytes at each instant.

FSDP handles a group of parameters at a time: a block, or the root, all that is in no block. In a backward it
gathers a group and, with ZeRO 3, the group before it, and sums the gradients of each (``rank_gradients.py``).
"""

from collections.abc import Sequence
from operator import attrgetter

from ..pipeline.held_in_step import Instant, held_in_step
from ..pipeline.schedule_actions import Kind
from ..simulation.trace import Trace
from .end_of_step import note_end
from .rank_gradients import Peak, RankGradients, gathered_bytes
from .rank_parameters import RankParameters
from .second_part import walk_second_part
from .stage_costs import Run, StageBytes, StageCost, most_of
from .step_shape import Work


class RankWalk:
    """Walk through what may be the worst instants of a step of the rank of ``work``, and of pipeline ranks
    with stages like its own; ``peaks``: in a loss, and elsewhere.

    ``stages``: those of the rank. ``gathered``: the bytes of the weights that it computes with, where these
    are not the stored ones. ``gradients``: see there.
    """

    def __init__(self, work: Work, parameters: RankParameters, stages: Sequence[StageCost]) -> None:
        layout = work.layout
        self.work, self.parameters = work, parameters
        self.gradients = RankGradients(work, parameters)
        self.cut, self.made = layout.pipeline > 1, work.compute
        # Without another rank there is nothing to gather.
        self.zero = 0 if self.gradients.alone else layout.zero
        largest = max(
            (piece.plain.weights for stage in stages for piece in {*stage.blocks.values()}), default=0.0
        )
        self.here = layout.stages_of(work.at.pipeline)
        self.stages = [
            stage.in_walk(work, zero=self.zero, own_input=number - 1 in self.here, largest=largest)
            for number, stage in zip(self.here, stages, strict=True)
        ]
        runs = [stage.runs for stage in self.stages]
        self.buffers = [*map(self.gradients.buffer, self.here, runs)]
        self.peaks, self._actions = dict[bool, Peak](), dict[object, dict[bool, Peak]]()
        #: Of a module that is not the zoo's it is not known when its gradients appear.
        self.in_blocks = all(stage.blocks for stage in stages)
        # FSDP copies weights once more that it has cut along another dim than the first.
        self.recut = parameters.most("recut") * self.made
        self.gathered = gathered_bytes(work, parameters, self.zero)
        # In a step's last backward gathered weights go with their block, or at the end of a pipeline's.
        copies = work.offload or work.compute != work.master
        self.gathers = (self.zero in (1, 2) or (not self.zero and copies)) and not self.gradients.alone
        self.drops = self.gathers and not self.cut

    def walk(self, number: int) -> None:
        """Walk through the actions at which a pipeline rank holds most, and through its last backwards."""
        work, self.here, peaks = self.work, self.work.layout.stages_of(number), dict[bool, Peak]()
        self.rest_of_root = self.gradients.of_root((), self.here)
        message, layout = work.between_blocks if self.cut else 0, work.layout
        step = held_in_step(
            work.schedule, layout.pipeline, layout.virtual_stages, layout.v_shape, work.micro_batches, number,
            *(tuple(map(attrgetter(name), self.stages)) for name in ("kept", "halfway")), message,
        )  # fmt: skip
        instants = [(instant, self._is_last(instant)) for instant in step.heaviest]
        if work.micro_batches > 1 and self.gradients.in_last:
            backwards = [instant for instant, _ in instants if instant.kind == "B"]
            ends = step.last_backwards() if self.cut else backwards
            instants = [(instant, last) for instant, last in instants if not last or instant.kind in "FI"]
            instants += [(end, True) for end in ends]
        for instant, last in instants:
            place = self.here.index(instant.stage)
            missing = self._begin(instant, place)
            for loss, peak_of_action in self._action(instant.kind, place, last=last).items():
                peak = peak_of_action.after(instant.bytes, instant.messages * message, missing)
                peaks[loss] = max(peaks.get(loss, peak), peak, key=attrgetter("bytes"))
        self.peaks = peaks
        for stage in dict.fromkeys(self.stages):
            self._first_forward(stage)
        note_end(self)

    def _action(self, kind: Kind, place: int, *, last: bool) -> dict[bool, Peak]:
        """Return the peaks of an action beside what the rank holds as it begins; many have equal ones."""
        stage, all_summed = self.stages[place], len(self.summed) + 1 >= len(self.stages)
        ends = self._exit(place), self.here[place] == 0
        key = kind, stage, ends, last, all_summed, place in self.absent, self.of_root, self.before
        if key not in self._actions:
            self.peaks = self._actions[key] = {}
            if kind == "F":
                self._loss(place)
            elif kind == "I":
                self.note(stage.first_part)
            elif kind == "W" and not stage.stage.first:
                walk_second_part(self, place, self._exit(place), last=last)
            else:
                self._backward(place, last=last)
        return self._actions[key]

    def _is_last(self, instant: Instant) -> bool:
        """Tell whether a backward is the last one of its stage: of two the one that is not the first."""
        few = self.work.micro_batches
        return few == 1 or (few == 2 and self.here.index(instant.stage) not in instant.absent)

    def note(self, beside: float, *, loss: bool = False) -> None:
        """Note the bytes of an instant: what is held now, and what is ``beside``."""
        size = self.now + beside + self.left + self.last_sum - self.missing - self.dropped
        if loss not in self.peaks or size > self.peaks[loss].bytes:
            gradients = self.missing - self.before
            self.peaks[loss] = Peak(size, self.resident, 0.0, gradients, self.dropped)

    def _begin(self, instant: Instant, place: int) -> float:
        """Begin an action; return the bytes of gradients that are not there yet. What the rank holds counts
        as 0 until the action has ended.
        """
        self.absent = instant.absent if self.in_blocks else ()
        self.resident = self.now = self.dropped = self.missing = 0.0
        gradients, root, few = self.gradients, self.rest_of_root, self.work.micro_batches == 2
        #: What lasts of the gradients that the backward of this stage makes, and none before it.
        self.of_root = 0.0
        # In the last backward of a stage.
        self.summed = instant.summed
        buffers = self.buffers
        if self.absent:
            root = gradients.of_root(self.absent, self.here)
            others = [other for other in self.absent if other != place]
            self.of_root = root - gradients.of_root(others, self.here)
            buffers = [buffer for number, buffer in enumerate(buffers) if number not in self.absent]
        self.before = self.left = max(buffers, default=0.0) * (self.work.micro_batches > 1)
        # The first sum is the gradient itself; of two micro-batches another end's second one may come before.
        few = few and not (self.parameters.ends and place in self.absent)
        first = len(self.absent) == len(self.stages)
        self.last_sum = 0.0 if first or few else gradients.last_sum
        not_yet = sum(gradients.lasts(gradients.stages[place]) for place in self.absent)
        return root + not_yet + sum(gradients.given_back(gradients.stages[place]) for place in instant.summed)

    def _loss(self, place: int) -> None:
        at, stage, loss = self.stages[place], self.stages[place].stage, self.stages[place].stage.loss
        assert loss is not None
        working = max(loss.plain.forward, loss.plain.backward)
        working += 0 if self.cut and at.logits else loss.plain.kept
        if not stage.blocks:  # one piece, in whose trace the loss is
            working = max(part.plain.forward for part in stage.beside)
        elif self.zero == 3:
            # FSDP keeps what it received for the root until it has gathered the first block.
            block, taken = next(iter(stage.blocks.values())).plain, self.work.between_blocks * self.cut
            gathers = self.parameters.root.here * self.made + 2 * (block.weights - block.experts)
            self.note(taken - at.kept + gathers)
        self.note(working, loss=True)

    def _first_forward(self, stage: StageBytes) -> None:
        """Note the forward of a step's first micro-batch, for which ZeRO 1 and 2 gather."""
        if self.zero in (1, 2) and stage.runs:
            self.dropped = self.left = self.before = self.last_sum = 0.0
            self.missing, self.resident, self.now = self.gradients.lasting, stage.kept, stage.kept
            ahead = self.parameters.most("here") * self.made
            self.note(self._made_in_last(stage) + ahead)

    def _made_in_last(self, stage: StageBytes) -> float:
        """Return the bytes beside the kept ones in the forward of a stage's last block."""
        # In the last block's forward what the stage gives is not there yet; then it is.
        run = next((run for run in stage.runs if run.piece in stage.stage.blocks.values()), None)
        forward = 0 if run is None else max(run.piece.plain.forward, self.work.between_blocks)
        return max(forward - stage.exit - stage.output, 0 if self.cut else stage.logits)

    def _exit(self, place: int) -> float:
        """Return the trained elements of the root that the model's last stage uses."""
        return self.parameters.exit * (place == len(self.stages) - 1)

    def _backward(self, place: int, *, last: bool) -> None:
        stage, work, exit, gradients = self.stages[place], self.work, self._exit(place), self.gradients
        zero3, first, tied = self.zero == 3, place in self.absent, self.parameters.tied
        self._forwards(stage)
        ahead = stage.runs[0].trace.weights - stage.runs[0].trace.experts if stage.runs else stage.largest
        if zero3 and self.cut and (exit or self.here[place] == 0):  # FSDP gathers the root beside a block
            self.note(self.parameters.root.here * self.made + ahead)
        # The gradients of the output layer wait for the root's, and a tied weight's for its second part.
        waits = (tied if gradients.adds else exit) * gradients.of_head
        if first and gradients.adds:
            self.missing -= (early := min(max(exit - tied, 0) * gradients.sum, self.of_root))
            self.of_root -= early
        if stage.logits:
            head = 0.0 if first and gradients.adds else exit * self.made
            self.note(work.whole + (0 if self.cut else stage.logits) + head + zero3 * ahead)
        if behind := stage.stage.behind:
            end, added = most_of(behind, "backward"), "with_gradient" if gradients.adds else "with_gradients"
            if not stage.stage.blocks:
                most = end + self.parameters.most("largest") * self.made
                end = max(most_of(behind, "with_gradient"), most) + waits
                ahead = 2 * self.parameters.most("here") * self.made
            elif work.loss_chunk:  # whose gradients have waited since the loss
                end += waits
            else:
                over = stage.logits * self.cut  # the gradient of logits is written over them
                end = max(getattr(behind[0].plain, added) - over, most_of(behind[1:], "backward") + waits)
            self.note(end + zero3 * ahead)
        self.now -= stage.logits * self.cut
        message = work.between_blocks if self.cut and stage.stage.loss is None else 0
        for number, run in enumerate(stage.runs):
            self.now -= stage.exit * (number == stage.further)
            self._blocks(run, place, waits, message, last=last)
            message = 0
        entry = stage.stage.entry
        self.now = self.resident - stage.kept + stage.output * (stage.stage.loss is None)
        self._root(place, waits, 0 if entry is None else entry.plain.backward, last=last)

    def _blocks(self, run: Run, place: int, waits: float, message: float, *, last: bool) -> None:
        """Walk through the backward of blocks that are alike: the first two, and the last one. ``waits``: the
        bytes of gradients that wait for a sum; ``message``: of the gradient that came to the first block.
        """
        trace, weights, grads, gradients = run.trace, run.trace.weights, run.trace.gradients, self.gradients
        zero3, drops, first = self.zero == 3, last and self.drops, place in self.absent
        summing = gradients.each or (last and gradients.in_last)
        most = trace.with_gradient if gradients.adds and not first else trace.with_gradients
        group, experts = self.parameters.group(run.block), trace.experts
        own, without_experts = weights - experts, grads - experts
        # What lasts of a block's gradients from its backward on, less what their sum gives back.
        lasting = gradients.lasts(group) * first - gradients.given_back(group) * last
        of_experts = lasting * experts / max(grads, 1) * summing
        left = without_experts * self.work.reduce / self.made * gradients.leaves_buffer * summing
        summed = gradients.summed(without_experts / self.made, min(group.last, without_experts / self.made))
        start, missing, dropped, before = self.now, self.missing, self.dropped, self.left
        for index in sorted({0, min(1, run.number - 1), run.number - 1}):
            self.now = start - index * trace.kept
            self.missing, self.dropped = missing - index * lasting, dropped + index * weights * drops
            self.left = left if index and summing else before
            ahead = zero3 * (own if index < run.number - 1 else run.ahead)
            came = message * (not index)
            # FSDP copies what it received before it gathers the block before, or the block's own experts.
            self.note(self.work.between_blocks + waits + zero3 * (2 * own + self.recut * (not experts)))
            if experts and summing:
                self._experts(trace, most, came, waits, ahead, of_experts, drops)
            else:
                self.note(most - came + waits + zero3 * weights + ahead)
            self.now -= trace.kept
            self.dropped += weights * drops
            if summing:
                self.left = 0.0
                self.note(summed + waits + ahead)
                self.left = left
            self.missing -= lasting - of_experts

    def _forwards(self, stage: StageBytes) -> None:
        """Note the forwards of a micro-batch in the last block, and in blocks that no backward comes to."""
        zero3, block = self.zero == 3 and bool(stage.runs), stage.runs[0].trace if stage.runs else Trace()
        # FSDP keeps what it received for a group until it has gathered the next one.
        received = max(block.experts, block.weights - block.experts)
        self.note(self._made_in_last(stage) + zero3 * (block.weights + received))
        for piece in dict.fromkeys(stage.unreached):  # which keeps nothing
            # FSDP has the last of them, which it has gathered for a backward that does not come; and what it
            # received for the block before, until the weights are copied.
            forward = max(piece.plain.kept + piece.plain.forward, zero3 * stage.largest)
            self.note(self.work.between_blocks - stage.kept + forward + zero3 * 3 * stage.largest)

    def _experts(
        self, trace: Trace, most: float, came: float, waits: float, ahead: float, lasting: float, drops: bool
    ) -> None:
        """Note the instants of a block whose experts FSDP gathers and sums apart, and before it. With their
        backward it gathers the block before, ``ahead``; see ``_blocks``. ``lasting``: of their gradients.
        """
        experts, zero3, gradients = trace.experts, self.zero == 3, self.gradients
        others, elements = waits + zero3 * trace.weights, experts / self.made
        self.note(min(trace.to_experts, most) - came + others)
        if zero3:  # FSDP copies what it received
            self.note(trace.copied_experts + others + experts + self.recut)
        others += ahead
        self.note(min(trace.in_experts, most) + others)
        others -= experts * (zero3 or drops)
        self.left = 0.0
        summed = gradients.summed(elements, self.parameters.most("largest"), experts=True)
        self.note(trace.at_experts + others + summed)
        self.left = elements * self.work.reduce * gradients.leaves_buffer
        self.missing -= lasting
        self.note(trace.after_experts + others)

    def _root(self, place: int, waits: float, backward: float, *, last: bool) -> None:
        """Walk through the end of a backward: the embedding, and the sum of the root's gradients."""
        itemsize, parameters, gradients = self.made, self.parameters, self.gradients
        # Autograd adds the two parts of a tied weight's gradient into a third tensor.
        joined = parameters.tied * (2 * itemsize + gradients.of_head)
        embedding = (gradients.root - parameters.exit + parameters.tied) * itemsize * (self.here[place] == 0)
        if not gradients.each:
            if place in self.absent and gradients.adds:
                self.missing -= self.of_root
                cast = embedding * (itemsize != gradients.sum)
                self.note(max(backward + cast, joined - parameters.tied * gradients.sum))
            else:
                self.note(max(backward + waits * (not gradients.adds) + embedding, joined))
            if place in self.absent and not gradients.adds:
                self.missing -= self.of_root
                self.note(gradients.last * itemsize)
            if not last or not gradients.in_last or len(self.summed) + 1 < len(self.stages):
                return
        else:
            self.note(max(backward + waits, joined))
        # FSDP drops a group's weights before it sums its gradients.
        drops = self.zero == 3 or (last and self.gathers and not (self.cut and gradients.each))
        self.dropped += parameters.root.here * itemsize * drops
        self.left = self.last_sum = 0.0
        self.note(gradients.summed_root())
