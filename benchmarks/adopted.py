"""Measure models that transformers computes (docs/any_model.md): training steps and starts beside the zoo's
own code of the same model, and conversion of a type outside the zoo beside ``cp``.

The two trainers take turns, step by step. Processor time (of both ranks) stands beside seconds: work of others
on the machine does not change it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from measure import Row, at_most, in_turn, ratio
from trainers import save_model
from training import Contender, difference
from trilith.machine.llama import llama

#: Hidden 1,024, 8 blocks: 165 million parameters.
SHAPE = llama(1024, 8, ids=32000, heads=16, groups=8, tie_word_embeddings=False)
WAYS = {"adopted": "transformers", "zoo": "auto"}


def main(folder: Path, rounds: int) -> list[Row]:
    save_model(folder / "model", SHAPE)
    return [*steps(folder / "model", rounds), *starts(folder / "model", rounds)]


def trainer(folder: Path, way: str) -> Contender:
    """Start the two ranks of a trainer, with their weights."""
    model = {"config": SHAPE, "implementation": WAYS[way]}
    layout, shape = {"tensor": 2}, {"rows": 4, "compiled": False, "dtype": "float32"}
    return Contender(2, side="ours", folder=str(folder), layout=layout, model=model, **shape)


def steps(folder: Path, rounds: int) -> list[Row]:
    """Compare training steps of two tensor ranks, of one core each."""
    alive = {way: trainer(folder, way) for way in WAYS}
    seconds = in_turn({way: contender.step for way, contender in alive.items()}, rounds)
    for contender in alive.values():
        contender.end()
    if problem := difference(alive["adopted"].losses, alive["zoo"].losses, "float32"):
        print(f"no row: {problem}", flush=True)
        return []
    processor = {way: contender.processor[1:] for way, contender in alive.items()}
    what = "tensor 2, hidden 1,024: tokens a second by transformers' code, of those by the zoo's"
    return [
        ratio(name, taken["adopted"], taken["zoo"], goal=0.9)
        for name, taken in ((what, seconds), (f"{what}, by processor time", processor))
    ]


def starts(folder: Path, rounds: int) -> list[Row]:
    """Compare the starts of the same trainers: from their processes' first moment to the end of a step."""
    processor: dict[str, list[float]] = {way: [] for way in WAYS}

    def start(way: str) -> float:
        began, before = time.perf_counter(), os.times()
        contender = trainer(folder, way)
        contender.step()
        seconds = time.perf_counter() - began
        contender.end()
        after = os.times()
        processor[way].append(sum(after[2:4]) - sum(before[2:4]))
        return seconds

    turns: dict[str, Callable[[], float]] = {way: partial(start, way) for way in WAYS}
    seconds: dict[str, Any] = in_turn(turns, rounds)
    rows = []
    spent = {way: taken[1:] for way, taken in processor.items()}  # the first round does not count
    for name, taken in (("", seconds), (", processor time of both ranks", spent)):
        later = [a - b for a, b in zip(taken["adopted"], taken["zoo"], strict=True)]
        rows.append(at_most(f"the first step, later than the zoo's{name}", later, None if name else 4.0))
    return rows
