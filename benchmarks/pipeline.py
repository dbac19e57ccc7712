"""Measure how long ranks wait under each schedule, with stages that sleep, and compare with the formula.

There are 4 local ranks and 8 micro-batches. A rank's forward sleeps 0.25 s and its backward twice as long, so
that the machine's other work weighs little; sending and autograd count as waiting. Goals: within 0.02 of the
formula for GPipe, 1F1B and interleaved 1F1B; at most 0.12 for the zero-bubble ones.
"""

from __future__ import annotations

from pathlib import Path

from measure import Row, at_most
from sleeping_stages import measured_timetable
from trilith.pipeline import SCHEDULE_NAMES, bubble, layout_of

RANKS, MICRO_BATCHES, SECONDS = 4, 8, 0.25


def main(folder: Path, rounds: int) -> list[Row]:
    return [row(name, rounds) for name in SCHEDULE_NAMES]


def row(name: str, rounds: int) -> Row:
    layout = layout_of(name, RANKS)
    formula = bubble(name, layout, MICRO_BATCHES)
    unit = SECONDS / layout.virtual_stages
    tables = [measured_timetable(name, layout, MICRO_BATCHES, unit=unit) for _ in range(rounds)]
    found = sorted(table.bubble for table in tables)
    made = at_most(f"{name}: share of the step that ranks wait", found, 0.12, unit="")
    if name in ("gpipe", "1f1b", "interleaved"):
        made.goal, made.good = f"{formula:.3f} +- 0.02", abs(made.figure - formula) <= 0.02
    made.details = {"formula": formula, "most held by a rank": max(map(tables[0].most_held, range(RANKS)))}
    return made
