"""Hold what a simulated step did: plain data, which goes through a pipe."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Holder:
    """State the bytes at the peak of storages of one ``kind``, made by one operator in one module."""

    kind: str
    module: str
    phase: str
    operator: str
    bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Collective:
    """State a collective: the axis of the layout, its kind, and the bytes that it was given."""

    axis: str
    kind: str
    bytes: int
    phase: str
    module: str = ""


@dataclass(slots=True)
class OperatorSums:
    """Add up the calls of an operator in a phase: FLOPs of products, bytes read and written."""

    name: str
    phase: str
    count: int = 0
    flops: int = 0
    moved: int = 0


@dataclass(frozen=True)
class StepRecord:
    """Hold what one rank's step needs and does, to the byte, of the program that is not compiled.

    ``peak``: the most bytes on the device after any operator. ``holders``: these by kind, module and
    operator. ``host``: the bytes that offload keeps on the host. ``timeline``: for pieces of the step in
    order, (phase, most bytes).
    """

    rank: int
    kernels: str
    peak: int
    host: int
    holders: list[Holder]
    timeline: list[tuple[str, int]]
    collectives: list[Collective] = field(repr=False)
    operators: list[OperatorSums] = field(repr=False)

    @property
    def kinds(self) -> dict[str, int]:
        """Return the bytes at the peak by kind, the largest first."""
        sums = Counter[str]()
        for holder in self.holders:
            sums[holder.kind] += holder.bytes
        return dict(sums.most_common())

    @property
    def flops(self) -> int:
        return sum(operator.flops for operator in self.operators)
