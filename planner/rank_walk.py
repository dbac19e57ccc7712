"""Walk through the actions of a rank's step, block by block, and note the bytes at each instant.

FSDP handles a group of parameters at a time: a block, or the root, which is all that is in no block. With
ZeRO 3 a backward gathers a group and prefetches the one before it; then it reduces the group's gradients over
the data ranks (``rank_gradients.py``).
"""

from collections.abc import Sequence
from operator import attrgetter

from ..parallel_state import Layout
from ..pipeline.held_in_step import Instant, held_in_step
from ..pipeline.schedule_actions import Kind
from ..simulation.trace import Trace
from .further_instants import note_end, note_first_forwards, note_forwards, walk_second_part
from .rank_gradients import Peak, RankGradients, gathered_bytes
from .rank_parameters import RankParameters
from .stage_costs import Run, StageCost, most_of
from .step_shape import Work


class RankWalk:
    """Find the worst instants of a step of the rank of ``work``, and of pipeline ranks with stages like its
    own: ``peaks`` in a loss (``True``), and elsewhere.

    ``stages``: those of the rank. ``gathered``: the bytes of the weights that it computes with, where these
    are not the stored ones. Bytes are counted beside weights, moments and persistent gradients (``Peak``).
    """

    def __init__(self, work: Work, parameters: RankParameters, stages: Sequence[StageCost]) -> None:
        layout = work.layout
        self.work, self.parameters = work, parameters
        self.gradients = RankGradients(work, parameters)
        self.pipelined, self.itemsize = layout.pipeline > 1, work.compute
        # Without another rank there is nothing to gather.
        self.zero = 0 if self.gradients.without_fsdp else layout.zero
        blocks = (piece for stage in stages for piece in {*stage.blocks.values()})
        largest = max((piece.plain.weights for piece in blocks), default=0.0)
        self.numbers = layout.stages_of(work.at.pipeline)
        self.stages = [
            stage.in_walk(work, gathers=self.zero == 3, own_input=number - 1 in self.numbers, largest=largest)
            for number, stage in zip(self.numbers, stages, strict=True)
        ]
        runs = [stage.runs for stage in self.stages]
        self.buffers = [*map(self.gradients.buffer, self.numbers, runs)]
        self.peaks, self._actions = dict[bool, Peak](), dict[object, dict[bool, Peak]]()
        #: Of a module that is not the zoo's it is not known when its gradients appear.
        self.by_block = all(stage.blocks for stage in stages)
        # FSDP copies weights once more that it has cut along another dim than the first.
        self.recut = parameters.most("recut") * self.itemsize
        # It casts the shards that it sends beside the buffer that receives all.
        self.cast = (work.compute != work.master and not work.offload) / layout.data_sizes()[1]
        self.gathered = gathered_bytes(work, parameters, self.zero)
        # Gathered weights are freed block by block in a step's last backward, or at the end of a pipeline's.
        copies = self.zero in (1, 2) or (not self.zero and (work.offload or work.compute != work.master))
        self.keeps_gathered = copies and not self.gradients.without_fsdp
        self.drops_gathered = self.keeps_gathered and not self.pipelined

    def walk(self, number: int) -> None:
        """Walk through the actions in which a pipeline rank holds most, and through its last backwards."""
        work, self.numbers, peaks = self.work, self.work.layout.stages_of(number), dict[bool, Peak]()
        self.rest_of_root = self.gradients.root_without((), self.numbers)
        message, layout = work.between_blocks if self.pipelined else 0, work.layout
        alone = Layout(pipeline=layout.pipeline, virtual_stages=layout.virtual_stages, v_shape=layout.v_shape)
        sizes = (tuple(map(attrgetter(name), self.stages)) for name in ("kept", "halfway"))
        step = held_in_step(work.schedule, alone, work.micro_batches, number, *sizes, message)
        instants = [(instant, self._is_last(instant)) for instant in step.heaviest]
        if work.micro_batches > 1 and self.gradients.in_last:
            backwards = [instant for instant, _ in instants if instant.kind == "B"]
            ends = step.last_backwards() if self.pipelined else backwards
            instants = [(instant, last) for instant, last in instants if not last or instant.kind in "FI"]
            instants += [(end, True) for end in ends]
        for instant, last in instants:
            place = self.numbers.index(instant.stage)
            missing = self._begin(instant, place)
            for loss, peak_of_action in self._action(instant.kind, place, last=last).items():
                peak = peak_of_action.after(instant.bytes, instant.messages * message, missing)
                peaks[loss] = max(peaks.get(loss, peak), peak, key=attrgetter("bytes"))
        self.peaks = peaks
        if self.zero in (1, 2):
            note_first_forwards(self, step.first_forwards)
        note_end(self)

    def _action(self, kind: Kind, place: int, *, last: bool) -> dict[bool, Peak]:
        """Return the peaks of an action beside what the rank holds as it begins; equal actions are remembered
        by all that these depend on.
        """
        stage, all_summed = self.stages[place], len(self.summed) + 1 >= len(self.stages)
        ends, first = (self._exit(place), self.numbers[place] == 0), place in self.absent
        key = kind, stage, ends, last, all_summed, first, self.root_part, self.earlier_buffer
        if key not in self._actions:
            self.peaks = self._actions[key] = {}
            if kind == "F":
                self._forward(place)
            elif kind == "I":
                self.note(stage.first_part)
            elif kind == "W" and not stage.stage.first:
                walk_second_part(self, place, self._exit(place), last=last)
            else:
                self._backward(place, last=last)
        return self._actions[key]

    def copied(self, trace: Trace) -> float:
        """Return the bytes beside a block's own weights while FSDP copies what it has gathered: these, or
        then the experts that it gathers apart. What a rank holds alone comes in no buffer.
        """
        if not trace.apart:
            return trace.weights + self.recut
        several = self.work.layout.data_sizes(experts=True)[1] > 1
        return max(trace.weights - trace.apart, trace.apart + (trace.apart + self.recut) * several)

    def _is_last(self, instant: Instant) -> bool:
        """Tell whether a backward is the last one of its stage: of two the one that is not the first."""
        few = self.work.micro_batches
        return few == 1 or (few == 2 and self.numbers.index(instant.stage) not in instant.absent)

    def note(self, beside: float, *, loss: bool = False) -> None:
        """Note the bytes of an instant: those held since the action began, and those ``beside`` them."""
        size = self.now + beside + self.buffer + self.root_sum - self.missing - self.dropped
        if loss not in self.peaks or size > self.peaks[loss].bytes:
            gradients = self.missing - self.earlier_buffer
            self.peaks[loss] = Peak(size, self.resident, 0.0, gradients, self.dropped)

    def _begin(self, instant: Instant, place: int) -> float:
        """Begin an action, counting from 0; return the bytes of persistent gradients that no backward has
        made yet, or that are reduced already.
        """
        self.absent = instant.absent if self.by_block else ()
        self.resident = self.now = self.dropped = self.missing = 0.0
        gradients, root, few = self.gradients, self.rest_of_root, self.work.micro_batches == 2
        #: The persistent gradients of the root that the backward of this stage makes, and none before it.
        self.root_part = 0.0
        # In the last backward of a stage: the stages that have had theirs.
        self.summed = instant.summed
        buffers = self.buffers
        if self.absent:
            root = gradients.root_without(self.absent, self.numbers)
            others = [other for other in self.absent if other != place]
            self.root_part = root - gradients.root_without(others, self.numbers)
            buffers = [buffer for number, buffer in enumerate(buffers) if number not in self.absent]
        self.earlier_buffer = self.buffer = max(buffers, default=0.0) * (self.work.micro_batches > 1)
        # The first sum is the gradient itself; of two micro-batches another end's second one may come before.
        few = few and not (self.parameters.ends and place in self.absent)
        first = len(self.absent) == len(self.stages)
        self.root_sum = 0.0 if first or few else gradients.root_sum
        not_yet = sum(gradients.persistent_of(gradients.of_stages[place]) for place in self.absent)
        reduced = (gradients.of_stages[place] for place in instant.summed)
        return root + not_yet + sum(map(gradients.freed_by_reduction, reduced))

    def _forward(self, place: int) -> None:
        """Walk through a forward that computes the loss, or begins the model on a rank of both ends."""
        at, stage, loss = self.stages[place], self.stages[place].stage, self.stages[place].stage.loss
        if stage.blocks and self.zero == 3:
            # FSDP keeps the buffer of the root's all-gather until the first block's has started.
            block, taken = next(iter(stage.blocks.values())).plain, self.work.between_blocks * self.pipelined
            gathers = self.parameters.root.unsharded * self.itemsize + 2 * (block.weights - block.apart)
            self.note(taken - at.kept + gathers)
        if loss is None:
            return
        working = max(loss.plain.forward, loss.plain.backward)
        working += 0 if self.pipelined and at.logits else loss.plain.kept
        if not stage.blocks:  # one piece, in whose trace the loss is
            working = max(part.plain.forward for part in stage.beside)
        self.note(working, loss=True)

    def _exit(self, place: int) -> float:
        """Return the trained elements of the root that the model's last stage uses."""
        return self.parameters.exit * (place == len(self.stages) - 1)

    def _backward(self, place: int, *, last: bool) -> None:
        stage, work, exit, gradients = self.stages[place], self.work, self._exit(place), self.gradients
        zero3, first, tied = self.zero == 3, place in self.absent, self.parameters.tied
        note_forwards(self, stage)
        ahead = stage.runs[0].trace.weights - stage.runs[0].trace.apart if stage.runs else stage.largest
        # In a pipeline the root is gathered again, and a block ahead of it.
        if zero3 and self.pipelined and (exit or self.numbers[place] == 0):
            self.note(self.parameters.root.unsharded * self.itemsize + ahead)
        # The output layer's gradients wait until the root is reduced, a tied weight's for its second part.
        waits = (tied if gradients.accumulates else exit) * gradients.head_itemsize
        if first and gradients.accumulates:
            self.missing -= (early := min(max(exit - tied, 0) * gradients.sum_itemsize, self.root_part))
            self.root_part -= early
        if stage.logits:
            of_weight = 0.0 if first and gradients.accumulates else exit * self.itemsize
            self.note(work.whole + (0 if self.pipelined else stage.logits) + of_weight + zero3 * ahead)
        if behind := stage.stage.behind:
            end = most_of(behind, "backward")
            if not stage.stage.blocks:
                most = end + self.parameters.most("largest") * self.itemsize
                end = max(most_of(behind, "with_gradient"), most) + waits
                ahead = 2 * self.parameters.most("unsharded") * self.itemsize
            elif work.loss_chunk:  # whose gradients have waited since the loss
                end += waits
            else:
                over = stage.logits * self.pipelined  # the gradient of logits is written over them
                head = behind[0].plain
                of_head = head.with_gradient if gradients.accumulates else head.with_gradients
                end = max(of_head - over, most_of(behind[1:], "backward") + waits)
            self.note(end + zero3 * ahead)
        self.now -= stage.logits * self.pipelined
        message = work.between_blocks if self.pipelined and stage.stage.loss is None else 0
        for number, run in enumerate(stage.runs):
            self.now -= stage.exit * (number == stage.further)
            self._blocks(run, place, waits, message, last=last)
            message = 0
        entry = stage.stage.entry
        self.now = self.resident - stage.kept + stage.output * (stage.stage.loss is None)
        self._root(place, waits, 0 if entry is None else entry.plain.backward, last=last)

    def _blocks(self, run: Run, place: int, waits: float, message: float, *, last: bool) -> None:
        """Walk through the backward of blocks that are alike: the first two, and the last one.

        ``waits``: the bytes of the root's gradients that wait for its reduction; ``message``: those of the
        gradient of the stage's output, which came from another rank.
        """
        trace, weights, grads, gradients = run.trace, run.trace.weights, run.trace.gradients, self.gradients
        zero3, drops, first = self.zero == 3, last and self.drops_gathered, place in self.absent
        summing = gradients.in_each or (last and gradients.in_last)
        most = trace.with_gradient if gradients.accumulates and not first else trace.with_gradients
        group, experts = self.parameters.group(run.block), trace.experts
        own, numel = weights - trace.apart, (grads - experts) / self.itemsize
        # The persistent gradients that a block's backward makes, less those that their reduction frees.
        lasting = gradients.persistent_of(group) * first - gradients.freed_by_reduction(group) * last
        of_experts = lasting * experts / max(grads, 1) * summing
        left = numel * self.work.reduce * gradients.sums[False].leaves_buffer * summing
        reduction = gradients.reduction_peak(numel, min(group.last, numel))
        start, missing, dropped, before = self.now, self.missing, self.dropped, self.buffer
        for index in sorted({0, min(1, run.number - 1), run.number - 1}):
            self.now = start - index * trace.kept
            self.missing, self.dropped = missing - index * lasting, dropped + index * weights * drops
            self.buffer = left if index and summing else before
            ahead = zero3 * (own if index < run.number - 1 else run.ahead)
            came = message * (not index)
            # FSDP copies the gathered weights out of the buffer that received them, before it gathers more.
            copies = max(self.copied(trace), ahead * (1 + self.cast))
            begun = max(self.work.between_blocks, trace.copied_experts * (not experts))
            self.note(begun + waits + zero3 * (own + copies))
            if experts and summing:
                self._experts(trace, most, came, waits, ahead, of_experts, drops)
            else:
                self.note(most - came + waits + zero3 * weights + ahead)
            self.now -= trace.kept
            self.dropped += weights * drops
            if summing:
                self.buffer = 0.0
                self.note(reduction + waits + ahead)
                self.buffer = left
            self.missing -= lasting - of_experts

    def _experts(
        self, trace: Trace, most: float, came: float, waits: float, ahead: float, lasting: float, drops: bool
    ) -> None:
        """Note the instants of the backward of a block whose experts FSDP gathers and reduces apart.

        With their backward it prefetches the block before (``ahead``). ``lasting``: the bytes of their
        persistent gradients; for the others see ``_blocks``.
        """
        experts, zero3, gradients = trace.experts, self.zero == 3, self.gradients
        others, elements = waits + zero3 * trace.weights, experts / self.itemsize
        self.note(min(trace.to_experts, most) - came + others)
        if zero3:  # beside the buffer that received them
            self.note(trace.copied_experts + others + experts + self.recut)
        others += ahead
        self.note(min(trace.in_experts, most) + others)
        others -= experts * (zero3 or drops)
        self.buffer = 0.0
        reduction = gradients.reduction_peak(elements, self.parameters.most("largest"), experts=True)
        self.note(trace.at_experts + others + reduction)
        self.buffer = elements * self.work.reduce * gradients.sums[True].leaves_buffer
        self.missing -= lasting
        self.note(trace.after_experts + others)

    def _root(self, place: int, waits: float, backward: float, *, last: bool) -> None:
        """Walk through the end of a backward: the embedding, and the reduction of the root's gradients."""
        itemsize, parameters, gradients = self.itemsize, self.parameters, self.gradients
        # Autograd adds the two gradients of a tied weight into a third tensor.
        joined = parameters.tied * (2 * itemsize + gradients.head_itemsize)
        embedding = gradients.embedded * itemsize * (self.numbers[place] == 0)
        if not gradients.in_each:
            if place in self.absent and gradients.accumulates:
                self.missing -= self.root_part
                cast = embedding * (itemsize != gradients.sum_itemsize)
                self.note(max(backward + cast, joined - parameters.tied * gradients.sum_itemsize))
            else:
                self.note(max(backward + waits * (not gradients.accumulates) + embedding, joined))
            if place in self.absent and not gradients.accumulates:
                self.missing -= self.root_part
                self.note(gradients.last_numel * itemsize)
            if not last or not gradients.in_last or len(self.summed) + 1 < len(self.stages):
                return
        else:
            self.note(max(backward + waits, joined))
        # FSDP frees a group's weights before it reduces its gradients.
        drops = last and self.keeps_gathered and not (self.pipelined and gradients.in_each)
        drops = drops or self.zero == 3
        self.dropped += parameters.root.unsharded * itemsize * drops
        self.buffer = self.root_sum = 0.0
        self.note(gradients.root_reduction_peak())
