"""Time what the data ranks exchange, and what each does once a step: clipping, and the optimizer."""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from ..rank_parameters import Group, RankParameters
from ..remembered import remembered
from ..step_shape import Work
from .collectives import Links
from .machines import Machine
from .stage_timer import Kernels, StageSeconds


class Exchange(NamedTuple):
    """Hold the seconds in which the data ranks gather a group's weights, and sum its gradients: into pieces
    (``scatter``), and each piece over the replicas.

    ``unpacking``: those in which FSDP copies gathered weights to their places; ``packing``: gradients into
    the buffer that is summed. The device computes nothing meanwhile.
    """

    gather: float
    scatter: float
    replicas: float
    unpacking: float = 0.0
    packing: float = 0.0


class DataRanks:
    """Time the exchanges of the data ranks of a layout; ``work`` is that of any of its ranks."""

    def __init__(self, work: Work, machine: Machine, kernels: Kernels) -> None:
        self.work, self.layout, self.machine, self.kernels = work, work.layout, machine, kernels
        self.links = Links(work.layout, machine)

    @remembered
    def exchange(self, group: Group) -> Exchange:
        """Return the seconds of a group's exchanges over the data ranks."""
        exchange = self._exchanged("data", "replicas", group.padded, group.trained_padded)
        if group.apart:
            apart = self._exchanged("expert data", "expert replicas", group.apart, group.trained_apart)
            exchange = Exchange(*map(sum, zip(exchange, apart, strict=True)))
        return exchange

    def _exchanged(self, data: str, replicas: str, padded: int, trained: int) -> Exchange:
        """Return the seconds of pieces of these sizes over two axes: ranks with shards, and replicas."""
        work, seconds, piece = self.work, self.links.seconds, trained * self.work.reduce
        shards = self.links.place(data).ranks
        exchange = Exchange(
            seconds(data, "all_gather", padded * work.compute),
            seconds(data, "reduce_scatter", shards * piece),
            seconds(replicas, "all_reduce", piece),
        )
        if shards == 1 or self.machine.efficiency.groups:  # which are measured with these copies
            return exchange
        unpacking = self.kernels.moved(2 * shards * padded * work.compute)
        packing = self.kernels.moved(shards * trained * (work.compute + work.reduce))
        return exchange._replace(unpacking=unpacking, packing=packing)

    @cached_property
    def _rounds(self) -> dict[bool, tuple[int, float]]:
        """Return, for the root and for a block, the gathers in a backward with ZeRO 3, and the share of the
        sums that the replicas sum too.
        """
        work = self.work
        replicas = [work.sums_of_replicas(root=root) / work.sums for root in (False, True)]
        return {False: (1, replicas[False]), True: (int(not work.root_stays), replicas[True])}

    def around(
        self, group: Group, forward: float, backward: float, *, root: bool = False, reached: bool = True
    ) -> dict[str, float]:
        """Return the seconds of what FSDP exchanges for a group at every micro-batch, as far as they are
        longer than what runs beside: in forward, and in the two parts of a backward.
        """
        (gathers, replicas), exchange, exposed = self._rounds[root], self.exchange(group), self.links.exposed
        gathers *= reached
        zero3 = self.layout.zero == 3
        gather, unpacking = (exchange.gather, exchange.unpacking) if zero3 else (0.0, 0.0)
        summed, packing = exchange.scatter + exchange.replicas * replicas, exchange.packing
        back = exposed(gather * gathers + (0.0 if self.work.in_two else summed), backward)
        return {
            "forward": exposed(gather, forward) + unpacking,
            "inputs": back + (unpacking * gathers + (0.0 if self.work.in_two else packing)),
            "weights": summed + packing if self.work.in_two else 0.0,
        }

    def once(self, stages: Iterable[StageSeconds], parameters: RankParameters) -> float:
        """Return the exposed seconds of what a rank with these stages exchanges once a step."""
        layout, exposed, seconds = self.layout, self.links.exposed, 0.0
        if not layout.holds_alone and layout.zero < 3:
            exchanges = [(self.exchange(group), number) for group, number in parameters.kinds]
            root, _ = exchanges[0]
            if layout.zero > 0:  # weights, beside the first forward
                forward = sum(stage.costs["F"] for stage in stages)
                gathers = sum(exchange.gather * number for exchange, number in exchanges)
                seconds += max(root.gather, exposed(gathers, forward))
            if layout.zero < 2:
                summed = sum((exchange.scatter + exchange.replicas) * n for exchange, n in exchanges)
                last = root.scatter + root.replicas
                backward = sum(stage.costs["B"] for stage in stages)
                seconds += summed if self.work.in_two else max(last, exposed(summed, backward))
        total, size, alone = parameters.every, max(self.work.master, self.work.reduce), self.links.seconds
        single = alone("tensor", "all_reduce", total.partial * size)
        single += alone("ends", "all_reduce", total.ends * size)
        return seconds + (single + 3 * alone("all", "all_reduce", 8))

    def update(self, parameters: RankParameters) -> float:
        """Time clipping, which reads gradients twice and writes them, and AdamW, which reads four numbers of
        each parameter and writes three.
        """
        total, work, kernels = parameters.every, self.work, self.kernels
        numbers, host = total.trained_sharded * work.master, self.machine.host
        copied = kernels.moved(total.unsharded * (work.master + work.compute)) * (work.master != work.compute)
        if work.offload:
            return (total.trained_sharded * work.reduce + numbers) / host + 10 * numbers / host + copied
        return kernels.moved(10 * numbers) + copied
