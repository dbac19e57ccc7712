"""State the bytes of a rank's gradients: as a backward makes them, as they persist in a step, and while FSDP
reduces them.

FSDP copies the unsharded gradients of a group (a block, or the root) into one buffer and reduce-scatters it
over the data ranks; this rank's shard of the sum becomes the gradient. The buffer is freed when the next
group is reduced, that of a backward's last group in the next backward (``reduce_scatter_states`` in torch).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .rank_parameters import Group, RankParameters
from .stage_costs import Run
from .step_shape import Work


class Peak(NamedTuple):
    """State the bytes at the worst instant of an action or of a step.

    ``bytes``: beside weights, moments, gathered weights and persistent gradients; less those of gradients
    that no backward has made yet (``missing``) and of gathered weights that are freed already (``dropped``).
    ``resident``: activations and messages among them; ``messages``: these alone.
    """

    bytes: float
    resident: float
    messages: float
    missing: float
    dropped: float

    def after(self, nbytes: float, messages: float, missing: float) -> Peak:
        """Return the peak of an action that begins with so many bytes of activations and messages."""
        size = self.bytes + nbytes - missing
        return Peak(size, self.resident + nbytes, messages, self.missing + missing, self.dropped)


class Sums:
    """State how FSDP makes gradients of the buffer that it sums over the ranks with the same weights; of
    ``experts`` that it reduces apart, these may be others.

    ``copies``: with one shard and replicas the reduced buffer is a copy, so that there are three for a
    moment, and torch frees the last gradient with the others. ``leaves_buffer``: whether the buffer stays
    beside the gradient: it does not become it, or this is on the host. ``shard``: the bytes that are made
    beside the buffer for each number in it.
    """

    def __init__(self, work: Work, *, experts: bool) -> None:
        replicas, shards, _ = work.layout.data_sizes(experts)
        all_reduced, casts = (
            shards == 1 and (not work.layout.zero or replicas == 1),
            work.reduce != work.master,
        )
        in_place, self.copies = all_reduced and not casts, shards == 1 and not all_reduced
        self.leaves_buffer = work.offload or not in_place
        cast_from = work.reduce * (casts and shards > 1)
        self.shard = (not in_place) * (work.master + cast_from) / shards + self.copies * work.reduce


class RankGradients:
    """Compute the bytes of gradients on a rank of ``work``, whose stages have the numbers 0, 1, ... here.

    ``without_fsdp``: no other rank has the same weights, so that FSDP does not wrap them. With FSDP gradients
    are reduced over the data ranks ``in_each`` backward (ZeRO 2 and 3, or one micro-batch a step), or only
    ``in_last``, after unsharded gradients were accumulated. ``accumulates``: whether a gradient is added to
    the earlier ones as soon as it is made; FSDP adds to sums of another dtype after a group's backward.

    Bytes of a number: ``itemsize`` of a gradient as it is made, ``sum_itemsize`` as it is accumulated,
    ``head_itemsize`` of the output layer's until the end of a backward. ``persistent``: the bytes of all
    gradients that persist between micro-batches.
    """

    def __init__(self, work: Work, parameters: RankParameters) -> None:
        layout, total = work.layout, parameters.every
        self.work, self.parameters, several = work, parameters, work.micro_batches > 1
        self.without_fsdp = layout.holds_alone and not work.offload
        self.in_each = not self.without_fsdp and (layout.zero >= 2 or not several)
        self.in_last = not self.without_fsdp and not self.in_each
        self.accumulates = not self.in_each and (self.without_fsdp or work.compute == work.reduce)
        self.itemsize, self.sum_itemsize = work.compute, work.reduce if several else work.master
        # The loss in several chunks leaves the gradient of its weight in the memory of their sum.
        in_chunks = 0 < work.loss_chunk < work.batch.count
        self.head_itemsize = max(work.loss_sums, work.compute) if in_chunks else work.compute
        #: The bytes of a number of a sum whose dtype is not that of the weights, so that it is cast.
        self.cast_from = work.reduce * (work.reduce != work.master)
        #: Of experts that FSDP reduces apart and of others: how the sum of a group becomes its gradient.
        self.sums = {experts: Sums(work, experts=experts) for experts in (False, True)}
        #: The sum of the blocks of each stage.
        self.of_stages = [
            sum((group.times(number) for group, number in blocks), Group()) for blocks in parameters.stages
        ]
        ends = parameters.ends or (parameters.root,)
        by_replicas = work.reduce * (self.in_each and several and layout.copies_shards)
        #: The sum of the root's gradients that FSDP keeps until replicas have added the next one to it.
        self.root_sum = by_replicas * (layout.pipeline > 1) * max(end.trained_sharded for end in ends)
        # With offload the sums of all groups stay on the device until replicas have added them up.
        waiting = by_replicas * work.offload * total.trained_sharded
        # The shards of a group's gradients are views of one buffer, which lives as long as one of them. The
        # two ends of a V reduce a tied weight in two buffers, if the first has another parameter of the root.
        apart = self.in_each and len(ends) > 1 and parameters.root.trained > ends[-1].trained
        of_root = self.persistent_of(parameters.root)
        self._of_root = sum(map(self.persistent_of, ends)) if apart else of_root
        self.persistent = self.persistent_of(total) - of_root + self._of_root + waiting
        self.root_numel, self.last_numel = max(end.trained for end in ends), max(end.last for end in ends)
        #: Trained elements of the embedding.
        self.embedded = self.root_numel - parameters.exit + parameters.tied

    def persistent_of(self, group: Group) -> float:
        """Return the bytes of a group's gradients that persist between micro-batches, or to the update."""
        work = self.work
        if self.in_each:
            # Replicas add up their sums at the end of a step, or in a pipeline in each backward.
            at_end = work.layout.copies_shards and work.micro_batches > 1 and work.layout.pipeline == 1
            return group.trained_sharded * work.reduce if at_end and not work.offload else self.reduced(group)
        if self.without_fsdp and work.micro_batches == 1:
            return group.trained_sharded * work.master
        return group.trained * self.sum_itemsize

    def reduced(self, group: Group) -> float:
        """Return the bytes on the device of a group's gradients once they are reduced.

        Where there are replicas FSDP keeps the sum until the next backward, also if the gradient is a cast.
        """
        itemsize = self.work.master + self.cast_from * self.work.layout.copies_shards
        return 0 if self.work.offload else group.trained_sharded * itemsize

    def buffer(self, stage: int, runs: Sequence[Run]) -> float:
        """Return the bytes of the buffer that a stage's backward leaves: of the root, if the stage uses it,
        or else of the first block; of a backward in two parts that of the last block, or of its experts.

        After a frozen embedding no gradient of an input tells FSDP that the first trained block is through:
        it reduces that block last, behind the root.
        """
        elements: float = self.root_numel * (stage in (0, self.work.layout.stages - 1))
        of_experts: float = 0
        if runs and (not elements or (stage == 0 and not self.embedded)):
            run = runs[0 if self.work.in_two else -1]
            of_experts = self.work.in_two and run.trace.experts
            elements = (of_experts or run.trace.gradients - run.trace.experts) / self.itemsize
        elements = elements or self.parameters.most("trained")
        return elements * self.work.reduce * (self.in_each and self.sums[bool(of_experts)].leaves_buffer)

    def freed_by_reduction(self, group: Group) -> float:
        """Return the persistent bytes of a group's gradients that a step's last reduction frees.

        Below 0 where a cast takes more. In a pipeline all groups may be reduced at the end, when casts take
        the place of gathered weights.
        """
        freed = (self.persistent_of(group) - self.reduced(group)) * (self.in_each or self.in_last)
        return max(freed, 0.0) if self.in_last and self.work.layout.pipeline > 1 else freed

    def root_without(self, places: Iterable[int], stages: Sequence[int]) -> float:
        """Return the persistent bytes of the root's gradients that only the stages at these ``places`` of the
        rank's ``stages`` make.
        """
        layout, root, ends = self.work.layout, self.parameters.root, self.parameters.ends
        last = len(stages) - 1
        user = last if last and stages[-1] == layout.stages - 1 else 0
        users = {0: ends[0], last: ends[1]} if ends else {user: root}
        of_others = sum(self.persistent_of(group) for place, group in users.items() if place not in places)
        return max(self._of_root - of_others, 0.0)

    def reduction_peak(
        self, elements: float, last: float, further: float = 0.0, *, experts: bool = False
    ) -> float:
        """Return the most bytes while a group of ``elements`` gradients is reduced, those of its gradients
        included.

        ``last``: the elements of the last gradient, which is freed after the others; ``further``: bytes that
        it has beyond theirs. ``experts``: whether these are experts that FSDP reduces apart.
        """
        buffer, sums = elements * self.work.reduce, self.sums[experts]
        shard, last = elements * sums.shard, last * (not sums.copies)
        if self.in_last:
            return buffer + max(shard - (elements - last) * self.sum_itemsize, 0)
        return buffer + max(elements * self.itemsize, shard + last * self.itemsize) + further

    def root_reduction_peak(self) -> float:
        """Return the most bytes while the gradients of the root are reduced."""
        head = self.parameters.exit - self.parameters.tied
        return self.reduction_peak(
            self.root_numel, self.last_numel, head * (self.head_itemsize - self.itemsize)
        )


def gathered_bytes(work: Work, parameters: RankParameters, zero: int) -> float:
    """Return the bytes of the weights that a rank computes with, where these are not the stored ones."""
    total = parameters.every
    if zero or work.offload:
        return (total if zero < 3 else parameters.root).unsharded * work.compute
    # Only those that are stored in another dtype, as the frozen weights beside adapters are not.
    frozen, stored = total.unsharded - total.trained, total.fixed_bytes - total.buffer_bytes
    cast = total.trained * (work.compute != work.master)
    return (cast + frozen * (stored != frozen * work.compute)) * work.compute
