"""Time collectives over the links that their ranks really use, by latency and rate (Thakur et al. 2005).

A group's ranks are ``stride`` apart, in the layout's order, and nodes hold consecutive ranks. If several
ranks of a group share a node, they send to the next node over as many links, up to the rate inside a node.
Collectives of all groups of an axis run at once, so the group that lies worst is timed.

A ring sends ``(n - 1) / n`` of the bytes for each of its two halves, in ``n - 1`` messages (Patarasu and Yuan
2009). Two trees send the bytes up and down in as many messages as they are deep (Sanders, Speck and Traeff
2009); NCCL takes the faster of both, and so does this.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, lcm, log2

from ...layers import Checkpointing
from ...parallel_state import BadInput, Layout
from ..communication import group_of, ring_wire_bytes
from ..remembered import remembered
from .machines import Machine

#: The axes over which FSDP gathers and sums groups of parameters.
FSDP_AXES = ("data", "replicas", "expert data", "expert replicas")


@dataclass(frozen=True, slots=True)
class Placement:
    """State how a group lies on nodes: ``ranks`` on ``nodes`` nodes, at least ``together`` on each."""

    ranks: int
    nodes: int
    together: int


@lru_cache(maxsize=4096)
def worst_placement(ranks: int, stride: int, world: int, gpus: int) -> Placement:
    """Place the groups of ``ranks`` ranks, ``stride`` apart, that ``world`` ranks form, on nodes of ``gpus``.

    Return the worst place: on most nodes, with the fewest ranks on one of them.
    """
    if stride >= gpus:
        return Placement(ranks, ranks, 1)
    span, last = ranks * stride, (ranks - 1) * stride
    # Groups that start at the same place of a node lie alike, and so do those between two strides of a node.
    places = range(stride if gpus % stride else 1)
    starts = (start + place for start in range(0, min(world, lcm(span, gpus)), span) for place in places)
    firsts = {start % gpus for start in starts if start + last < world}
    on_nodes = [Counter((first + place) // gpus for place in range(0, span, stride)) for first in firsts]
    placements = (Placement(ranks, len(on), min(on.values())) for on in on_nodes)
    return max(placements, key=lambda place: (place.nodes, -place.together))


class Links:
    """Time the collectives of a layout on a machine."""

    def __init__(self, layout: Layout, machine: Machine) -> None:
        self.layout, self.machine = layout, machine

    @remembered  # asked for hundreds of times in a step
    def place(self, axis: str) -> Placement:
        """Return how the group of an axis lies that lies worst."""
        ranks, stride = group_of(self.layout, axis)
        return worst_placement(ranks, max(stride, 1), self.layout.world, self.machine.gpus)

    def rate(self, axis: str, kind: str = "") -> float:
        """Return the bytes a second that a rank sends along an axis."""
        place, in_node, between = self.place(axis), self.machine.inside.rate, self.machine.between.rate
        rate = in_node if place.nodes == 1 else min(in_node, place.together * between)
        return rate * self.machine.efficiency.link(kind)

    def seconds(
        self, axis: str, kind: str, size: float, count: int = 1, mode: Checkpointing = "none"
    ) -> float:
        """Return the seconds of ``count`` collectives to which a rank gives ``size`` bytes in all.

        ``mode``: the activation checkpointing of the block that they are in.
        """
        place = self.place(axis)
        if place.ranks == 1 or not count or not size:
            return 0.0
        if not self.machine.inside.rate:
            raise BadInput(
                "machine", "links", expected="measured rates between devices", found="one device",
                todo="Run `trilith bench` where there are several, or name a machine of the table",
            )  # fmt: skip
        if axis in FSDP_AXES and (group := self.machine.efficiency.groups.get(kind)) is not None:
            return ring_wire_bytes(kind, size, place.ranks) / group.rate + count * group.latency
        reached = self.machine.efficiency
        waits = reached.exchanges if kind == "exchange" else reached.collectives
        return count * waits.get(mode, 0.0) + self._alone(place, kind, size, count, self.rate(axis, kind))

    def exposed(self, seconds: float, other_work: float) -> float:
        """Return the seconds of a collective that are not hidden by ``beside``, the seconds of other work."""
        return max(0.0, seconds - other_work) if self.machine.asynchronous else seconds

    def _alone(self, place: Placement, kind: str, size: float, count: int, rate: float) -> float:
        """Time collectives that follow each other."""
        around = self._around(place)
        wire = ring_wire_bytes(kind, size, place.ranks) / rate
        if kind == "all_reduce":
            # Each of two trees reduces one half and sends it back. A rank has two children in one tree and
            # none in the other, so it sends one half up in each, and one half to each child.
            tree = 2 * size / rate + count * 2 * self._deep(place)
            return min(wire + count * 2 * around, tree)
        if kind in ("all_gather", "reduce_scatter"):
            return wire + count * around
        if kind == "all_to_all":
            return self._all_to_all(place, size, count)
        return wire + count * self._latency(place)  # send, and a ring's exchange with a neighbour

    def _latency(self, place: Placement) -> float:
        return (self.machine.inside if place.nodes == 1 else self.machine.between).latency

    def _around(self, place: Placement) -> float:
        """Return the latency of the messages of one way around a ring."""
        over = place.nodes - 1
        return (place.ranks - 1 - over) * self.machine.inside.latency + over * self.machine.between.latency

    def _deep(self, place: Placement) -> float:
        """Return the latency of one way through a tree: along a node's ranks, and over nodes by halves."""
        within = (place.together - 1) * self.machine.inside.latency
        return within + ceil(log2(place.nodes)) * self.machine.between.latency

    def _all_to_all(self, place: Placement, size: float, count: int) -> float:
        """Time an exchange in which each rank gives an equal part of ``size`` to each."""
        share, rank_share = self.machine.efficiency.link("all_to_all"), size / place.ranks
        away = rank_share * (place.ranks - place.together)
        near = rank_share * (place.together - 1)
        seconds = max(near / self.machine.inside.rate, away / self.machine.between.rate) / share
        return seconds + count * self._latency(place)
