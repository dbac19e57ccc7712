"""State the bytes of a rank's gradients: as they are made, as they last in a step, and while they are summed.

FSDP copies the gradients of a group into a buffer, which is summed over the data ranks; a shard of the sum
stays. The buffer stays until the next group has its gradients, so that of the last group stays until the next
backward (``reduce_scatter_states`` in torch).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .rank_parameters import Group, RankParameters
from .stage_costs import Run
from .step_shape import Work


class Peak(NamedTuple):
    """State the bytes at the worst instant of an action or of a step: all of them, activations and messages,
    and what is not there: gradients that last and that no backward has made yet, and weights that are dropped
    already.
    """

    bytes: float
    resident: float
    messages: float
    missing: float
    dropped: float

    def after(self, nbytes: float, messages: float, missing: float) -> Peak:
        """Return the peak where so many bytes are held, with those of messages, and so many are missing."""
        size = self.bytes + nbytes - missing
        return Peak(size, self.resident + nbytes, messages, self.missing + missing, self.dropped)


class RankGradients:
    """Hold bytes of gradients on a rank of ``work``, by its stages' places on the rank.

    ``alone``: whether the weights are shared with no rank, and not by FSDP (``compute_weights``). ``each``:
    whether each backward sums gradients over the data ranks; ``in_last``: whether the last one alone sums the
    sums of all. ``adds``: whether a gradient is added to earlier ones as soon as it is made: FSDP adds to
    sums of another dtype only after the backward of a group. ``made``, ``sum``: bytes of a trained number's
    gradient as it is made, and as it lasts before it is summed; ``of_head``: of the output layer's as it
    waits for the end of a backward. ``lasting``: the bytes of those that last between micro-batches.
    """

    def __init__(self, work: Work, parameters: RankParameters) -> None:
        layout, total = work.layout, parameters.every
        self.work, self.parameters, several = work, parameters, work.micro_batches > 1
        self.alone = layout.holds_alone and not work.offload
        self.each = not self.alone and (layout.zero >= 2 or not several)
        self.in_last = not self.alone and not self.each
        self.adds = not self.each and (self.alone or work.compute == work.reduce)
        self.made, self.sum = work.compute, work.reduce if several else work.master
        # The loss in several chunks leaves the gradient of its weight in the memory of their sum.
        chunks = 0 < work.loss_chunk < work.batch.count
        self.of_head = max(work.loss_sums, work.compute) if chunks else work.compute
        copies, shards, _ = layout.data_sizes()
        #: The bytes of a number's sum that is cast, because it is of another dtype than the weights.
        self.cast_from = work.reduce * (work.reduce != work.master)
        #: The bytes of a shard for each number of a group: of experts apart, or of others.
        shard_bytes = 0.0 if work.offload else float(work.master + self.cast_from * (shards > 1))
        self.shard = {experts: shard_bytes / layout.data_sizes(experts)[1] for experts in (False, True)}
        #: Whether a buffer becomes the sum, or another one does. Where that is a copy, as of one shard, there
        #: is a third one between these, and torch lets go of the last gradient with the others.
        whole = shards == 1 and (not layout.zero or copies == 1)
        self.in_place, self.in_three = whole and not self.cast_from, shards == 1 and not whole
        #: Whether a buffer stays that is not the gradient: with offload this is on the host.
        self.leaves_buffer = work.offload or not self.in_place
        #: What the blocks of each stage have.
        self.stages = [
            sum((group.times(number) for group, number in blocks), Group()) for blocks in parameters.stages
        ]
        ends = parameters.ends or (parameters.root,)
        copied = self.each and several and layout.copies_shards
        #: The root's last sum, which FSDP holds until the next one where replicas add it up. The first one is
        #: the gradient itself.
        self.last_sum = copied * (layout.pipeline > 1) * max(end.trained_stored for end in ends) * work.reduce
        # With offload the sums of all groups stay on the device until replicas have added them up.
        waiting = copied * work.offload * total.trained_stored * work.reduce
        # The shards of a sum are parts of one buffer, which lasts while one of them is a gradient. A tied
        # weight at both ends of a V is in two, if the first stage uses another parameter of the root, too.
        apart = self.each and len(ends) > 1 and parameters.root.trained > ends[-1].trained
        self._root = sum(map(self.lasts, ends)) if apart else self.lasts(parameters.root)
        self.lasting = self.lasts(total) - self.lasts(parameters.root) + self._root + waiting
        self.root, self.last = max(end.trained for end in ends), max(end.last for end in ends)

    def lasts(self, group: Group) -> float:
        """Return how many bytes last of the gradients of a group."""
        work = self.work
        if self.each:
            # Replicas add up their sums at the end of a step, or in a pipeline at each backward.
            at_end = work.layout.copies_shards and work.micro_batches > 1 and work.layout.pipeline == 1
            return group.trained_stored * work.reduce if at_end and not work.offload else self.shards(group)
        if self.alone and work.micro_batches == 1:
            return group.trained_stored * work.master
        return group.trained * self.sum

    def shards(self, group: Group) -> float:
        """Return the bytes of what stays on the device of a group's gradients after their sum.

        Of replicas FSDP keeps the sum until the next backward, also where the gradient is a cast of it.
        """
        number = self.work.master + self.cast_from * self.work.layout.copies_shards
        return 0 if self.work.offload else group.trained_stored * number

    def buffer(self, stage: int, runs: Sequence[Run]) -> float:
        """Return the bytes of the buffer that the last sum of a stage's backward leaves: of the root, if the
        stage uses it, or else of the first block; of one in two of the last block, and of its experts.
        """
        elements: float = self.root * (stage in (0, self.work.layout.stages - 1))
        if not elements and runs:
            run = runs[0 if self.work.in_two else -1]
            of_experts = run.trace.experts if self.work.in_two else 0
            elements = (of_experts or run.trace.gradients - run.trace.experts) / self.made
        elements = elements or self.parameters.most("trained")
        return elements * self.work.reduce * (self.each and self.leaves_buffer)

    def given_back(self, group: Group) -> float:
        """Return what the sum of a group's gradients gives back in a step's last backward.

        It is below 0 where a cast takes more. In a pipeline all sums may come at the end, and casts take the
        place of gathered weights.
        """
        given_back = (self.lasts(group) - self.shards(group)) * (self.each or self.in_last)
        return max(given_back, 0.0) if self.in_last and self.work.layout.pipeline > 1 else given_back

    def of_root(self, absent: Iterable[int], stages: Sequence[int]) -> float:
        """Return how many bytes last of those gradients of the root that no other of the rank's ``stages``
        makes than those with ``absent`` places.
        """
        layout, root, ends = self.work.layout, self.parameters.root, self.parameters.ends
        last = len(stages) - 1
        user = last if last and stages[-1] == layout.stages - 1 else 0
        users = {0: ends[0], last: ends[1]} if ends else {user: root}
        of_users = sum(self.lasts(group) for place, group in users.items() if place not in absent)
        return max(self._root - of_users, 0.0)

    def summed(self, elements: float, last: float, further: float = 0.0, *, experts: bool = False) -> float:
        """Return the most bytes while the gradients of a group are summed, those of its weights included.

        ``last``: the elements of the last one, which is freed later than the others; ``further``: bytes that
        this one has beside theirs. ``experts``: whether they are of experts apart.
        """
        buffer, shard = elements * self.work.reduce, elements * self.shard[experts] * (not self.in_place)
        if self.in_three:
            shard += buffer
        if self.in_last:
            return buffer + max(shard - (elements - last * (not self.in_three)) * self.sum, 0)
        return buffer + max(elements * self.made, shard + last * self.made * (not self.in_three)) + further

    def summed_root(self) -> float:
        """Return the most bytes while the gradients of the root are summed."""
        head = self.parameters.exit - self.parameters.tied
        return self.summed(self.root, self.last, head * (self.of_head - self.made))


def gathered_bytes(work: Work, parameters: RankParameters, zero: int) -> float:
    """Return the bytes of the weights that a rank computes with, where these are not the stored ones."""
    total = parameters.every
    if zero or work.offload:
        return (total if zero < 3 else parameters.root).here * work.compute
    # Only those that are stored in another dtype, as the frozen weights beside adapters are not.
    frozen, stored = total.here - total.trained, total.fixed_bytes - total.buffer_bytes
    cast = total.trained * (work.compute != work.master)
    return (cast + frozen * (stored != frozen * work.compute)) * work.compute
