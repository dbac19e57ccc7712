"""A pipeline's idle time, and how many micro-batches a stage holds at once."""

from __future__ import annotations


def bubble(stages: int, micro_batches: int) -> float:
    """The share of a step in which a rank waits, under GPipe and 1F1B. Source: Narayanan et al. 2021."""
    return (stages - 1) / (micro_batches + stages - 1)


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations the stage holds at the worst moment."""
    return micro_batches if schedule == "gpipe" else min(stages - stage, micro_batches)
