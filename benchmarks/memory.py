"""Measure what `[memory]` saves and costs: activation checkpointing.

Bytes are counted exactly (`trilith.testing.LiveBytes`). Seconds are the process's own on the processor, on
one thread, so that other work on the machine disturbs them less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import Row, in_turn, ratio
from trilith.layers import (
    Checkpointing,
    checkpoint_blocks,
    vocab_parallel_cross_entropy,
)
from trilith.machine.cases import SMALL
from trilith.models import family_of
from trilith.testing import LiveBytes

MIB = 2**20
MODES: tuple[Checkpointing, ...] = ("none", "selective", "every", "full")
MODEL = SMALL | {"vocab_size": 4096}


def processor_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main(folder: Path, rounds: int) -> list[Row]:
    torch.set_num_threads(1)
    return checkpointing(rounds)


def checkpointing(rounds: int) -> list[Row]:
    """Measure a step's forward and backward: a model of 26 M parameters, 2 samples of 512 tokens, fp32."""
    family = family_of(MODEL)
    tokens = torch.randint(4096, (2, 512))
    models, alive = {}, {}
    for mode in MODES:
        torch.manual_seed(0)
        models[mode] = family.build(family.from_hf(MODEL), device="cpu")
        checkpoint_blocks([(int(n), b) for n, b in models[mode].layers.items()], mode, every=2)

    def step(mode: str) -> Callable[[], float]:
        def once() -> float:
            def work() -> None:
                vocab_parallel_cross_entropy(models[mode](tokens), tokens, 4096).mean().backward()

            return processor_seconds(work)

        return once

    for mode, model in models.items():
        with LiveBytes() as memory:
            model.head_in_loss = True
            hidden = model(tokens)
            alive[mode] = memory.now
            hidden.sum().backward()
            model.head_in_loss = False
    taken = in_turn({mode: step(mode) for mode in MODES}, rounds)
    rows = []
    for mode in MODES:
        rows.append(_bytes(f"activations up to the output layer, checkpointing = {mode}", alive[mode]))
        if mode != "none":
            rows.append(ratio(f"speed of a step, {mode}, of none", taken[mode], taken["none"]))
    return rows


def _bytes(name: str, size: int) -> Row:
    return Row(name, *[size / MIB] * 3, unit="MiB")
