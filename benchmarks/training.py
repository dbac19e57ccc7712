"""Measure a whole training step of a small Llama beside other libraries', on two cores.

Beside transformers alone, under DDP, FSDP2, torch's own pipeline and DTensor's plan, and megatron-core if it
is installed (``megatron_trainer.py``).

All contenders of a group live at once and take turns, one at a time; each has both cores: one process with
two threads, or two processes with one. In its turn a contender takes a step that is not measured, because its
memory may have been paged out while it waited, and then the measured one. Their losses must be equal, or
there is no row.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measure import Row, in_turn, ratio
from trainers import save_model

HERE = Path(__file__).resolve().parent
CORES = 2
#: How far losses of contenders may be apart, relative, over all steps.
NEAR = {"float32": 1e-4, "bfloat16": 2e-2}


class Contender:
    """The processes of one contender; ``step`` takes one training step on all of them."""

    def __init__(self, world: int = 1, **wanted: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.losses: list[float] = []
        self.processor: list[float] = []
        self.memory = 0.0
        self.ranks = []
        for rank in range(world):
            place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_PORT": port}
            place |= {"OMP_NUM_THREADS": max(1, CORES // world)}
            environment = {name: str(value) for name, value in place.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_WAIT_POLICY": "PASSIVE"}
            command = [sys.executable, str(HERE / "trainers.py"), json.dumps(wanted)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.ranks.append(subprocess.Popen(command, env=os.environ | environment, **pipes))
        for rank in self.ranks:
            self._answer(rank, "ready")

    def step(self) -> float:
        """Take a step; return its seconds."""
        began = time.perf_counter()
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write("step\n")
            rank.stdin.flush()
        found = [json.loads(self._answer(rank, "{")) for rank in self.ranks]
        seconds = time.perf_counter() - began
        self.losses.append(found[0]["loss"])
        self.processor.append(sum(answer["processor"] for answer in found))
        self.memory = max(answer["memory"] for answer in found)
        return seconds

    @staticmethod
    def _answer(rank: subprocess.Popen[str], begins: str) -> str:
        """Return the next line that begins so; libraries print lines of their own."""
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith(begins):
                return line
        raise SystemExit(f"a contender ended with code {rank.wait()}")

    def end(self) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)


@dataclass
class Comparison:
    """State what takes turns: contenders by name, of which the first is the one to compare with, and the
    goals of others. ``long``: a step takes so long that no other need go before it.
    """

    title: str
    contenders: dict[str, dict[str, Any]]
    goals: dict[str, float | None]
    long: bool = False


def comparisons(folder: str) -> Iterator[Comparison]:
    given = {"folder": folder, "rows": 4, "compiled": False, "dtype": "float32"}
    hf, two = {"side": "alone", **given}, {"world": 2, **given}
    one, ours = {"side": "ours", "layout": {}, **given}, {"side": "ours", **two}
    for how, change, goal in (
        ("", {}, 1.05), (", bf16", {"dtype": "bfloat16"}, 1.05), (", compiled", {"compiled": True}, 1.0),
    ):  # fmt: skip
        title = f"one process{', fp32' if how != ', bf16' else ''}{how}"
        yield Comparison(title, {"transformers": hf | change, "trilith": one | change}, {"trilith": goal})
    tensor = {"trilith": ours | {"layout": {"tensor": 2}}}
    yield Comparison("tensor 2", {"transformers": hf, **tensor}, {"trilith": 1.10})
    if find_spec("megatron") is None:
        print("megatron-core is not installed: no row (see benchmarks/megatron_trainer.py)", flush=True)
    else:
        theirs = {"megatron-core": {"side": "megatron", **two}}
        yield Comparison("tensor 2", {"transformers": hf, **theirs}, {"megatron-core": None})
    cut = {
        "sequence": ours | {"layout": {"tensor": 2, "sequence": True}},
        "dtensor": {"side": "dtensor", **two},
    }
    yield Comparison("tensor 2", {"transformers": hf, **cut}, {"sequence": None, "dtensor": None})
    for micro, goal in ((4, 0.80), (16, 0.95 * 16 / 17)):
        many = {"rows": 2 * micro}
        stages = {"layout": {"pipeline": 2}, **many}
        staged = {"trilith": ours | stages, "torch": {"side": "pipelining", **two, **stages}}
        title, goals = f"pipeline 2, {micro} micro-batches", {"trilith": round(goal, 3), "torch": None}
        yield Comparison(title, {"transformers": hf | many, **staged}, goals, long=True)
    for title, name, side, layout in (
        ("data 2", "ddp", "ddp", {"data": 2}), ("data 2, ZeRO 3", "fsdp2", "fsdp", {"data": 2, "zero": 3}),
    ):  # fmt: skip
        both = {name: {"side": side, **two}, "trilith": ours | {"layout": layout}}
        yield Comparison(title, both, {"trilith": 1.0})


def main(folder: Path, rounds: int, only: str = "") -> list[Row]:
    """Return the rows of the comparisons whose titles the pattern ``only`` matches."""
    save_model(folder / "model")
    rows: list[Row] = []
    for one in comparisons(str(folder / "model")):
        if not re.search(only, one.title):
            continue
        base = next(iter(one.contenders))
        taken = steps(one.contenders, rounds, again=not one.long)
        for name, goal in one.goals.items():
            ours, theirs = taken[name], taken[base]
            if said := difference(ours[0].losses, theirs[0].losses, one.contenders[base]["dtype"]):
                print(f"{one.title}, {name}: no row: {said}", flush=True)
                continue
            row = ratio(f"{one.title}: {name} against {base}", ours[1], theirs[1], goal=goal)
            row.details |= {"ours, MB a rank": ours[0].memory, "theirs, MB a rank": theirs[0].memory}
            rows.append(row)
            print(f"{row.name}: {row.figure:.2f} ({row.low:.2f} to {row.high:.2f})", flush=True)
    return rows


def steps(
    contenders: dict[str, dict[str, Any]], rounds: int, *, again: bool
) -> dict[str, tuple[Contender, list[float]]]:
    """Return each contender, ended, and its seconds; a round of warming up does not count.

    ``again``: each turn has two steps, of which the second counts.
    """
    alive = {name: Contender(**wanted) for name, wanted in contenders.items()}

    def turn(contender: Contender) -> float:
        return [contender.step() for _ in range(1 + again)][-1]

    seconds = in_turn({name: partial(turn, contender) for name, contender in alive.items()}, rounds)
    for contender in alive.values():
        contender.end()
    return {name: (contender, seconds[name]) for name, contender in alive.items()}


def difference(ours: list[float], theirs: list[float], dtype: str) -> str | None:
    """Return where losses differ, or ``None``. A contender that trains otherwise has no figure: a fast wrong
    step does not count.
    """
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not abs(a - b) <= NEAR[dtype] * abs(b):
            return f"the loss of step {number} is {a}, and theirs {b}"
    return None
