"""Compute the bubble of a pipeline schedule: the share of a step in which a rank waits, by formula."""

from fractions import Fraction
from math import ceil

from ..parallel_state import Layout
from .schedule_kinds import schedule_kind


def bubble(name: str, layout: Layout, micro_batches: int) -> float:
    """Return the share of a step in which a rank of this layout waits, by formula (``bubble_share``)."""
    return bubble_share(layout.pipeline, micro_batches, layout.virtual_stages, schedule=name)


def bubble_share(
    pipeline: int, micro_batches: int, virtual_stages: int = 1, *, schedule: str = "1f1b"
) -> float:
    """Return the share of a step in which a rank waits, by formula.

    The formula assumes that a stage's forward and each half of its backward take equally long everywhere, and
    that rounds are full. With p ranks of v stages it is ``(p - 1) / (v m + p - 1)``. If the backward is
    split, and the half that nobody waits for fills the gaps, it is ``(p - 1) / (3 v m + p - 1)``. DualPipeV
    has ``2 (p - 1)`` for ``p - 1``, because torch runs a forward and a backward of a pair one after the other
    and sends both results afterwards. Sources: Narayanan et al. 2021; Qi et al. 2023.
    """
    waits = (pipeline - 1) * (2 if schedule == "dualpipev" else 1)
    thirds = 3 if schedule_kind(schedule).two_backwards else 1
    return waits / (thirds * virtual_stages * micro_batches + waits)


def micro_batches_for(bubble: float, pipeline: int, virtual_stages: int = 1) -> int:
    """Return the smallest number of micro-batches whose bubble (``bubble_share``, 1F1B or interleaved) is at
    most ``bubble``, a share above 0.
    """
    needed = Fraction(pipeline - 1, virtual_stages) * (1 / Fraction(str(bubble)) - 1)
    return max(1, ceil(needed))
