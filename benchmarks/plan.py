"""Compare predicted steps with measured ones: drawn layouts of one model on this CPU, with one bench.

Each layout trains real steps in turn with the others, the same tokens a step. After half of the rounds the
bench measures products, attention, copies, launches and links; no figure is fitted to a step. Goals: of any
two layouts whose steps differ by more than 15 %, the planner names the faster one; and the layout that it
would choose takes at most 1.10 times as long as the fastest measured.
"""

from __future__ import annotations

import json
import os
import random
import statistics
from itertools import combinations
from pathlib import Path
from typing import Any

from measure import Row, at_most
from trilith.machine.child import in_ranks
from trilith.machine.measure.run import measure, report_json
from trilith.machine.measure.steps import WARM_UP, train_steps
from trilith.machine.random_files import llama, write_tokens
from trilith.parallel_state import BadInput
from trilith.planner.dry_run import plan_without_weights, predicted_step
from trilith.planner.time import Machine, StepTime, machine_from_bench
from trilith.recipes.recipe import parse_recipe

COUNT, STEPS, BATCH, LENGTH, SEED = 20, 4, 8, 256, 0
MODEL = llama(256, 6, ids=4096, length=LENGTH)
_AXES: tuple[dict[str, Any], ...] = (
    {},
    {"tensor": 2},
    {"tensor": 2, "sequence": True},
    *({"data": 2, "zero": zero} for zero in range(4)),
    {"context": 2},
    {"context": 2, "ring": True},
    *({"pipeline": 2, "schedule": name} for name in ("gpipe", "1f1b")),
    *({"pipeline": 2, "schedule": name, "virtual_stages": 2} for name in ("interleaved", "zbv")),
)


def drawn(folder: Path, tokens: Path, count: int = COUNT) -> dict[str, dict[str, Any]]:
    """Draw recipes that differ in layout, micro-batch and checkpointing."""
    draw, found = random.Random(SEED), dict[str, dict[str, Any]]()
    while len(found) < count:
        layout = dict(draw.choice(_AXES))
        micro_batch, mode = draw.choice((1, 2, 4)), draw.choice(("none", "none", "selective", "full"))
        name = ", ".join(f"{key} {value}" for key, value in layout.items()) or "one rank"
        name += f"; micro-batch {micro_batch}, {mode}"
        data = {"tokens": str(tokens), "sequence_length": LENGTH, "global_batch": BATCH}
        recipe: dict[str, Any] = {"out": str(folder / f"run-{len(found)}"), "steps": WARM_UP + STEPS}
        recipe |= {"device": "cpu", "compute": "float32", "model": {"config": MODEL}, "layout": layout}
        recipe |= {"memory": {"checkpointing": mode}, "data": data | {"micro_batch": micro_batch}}
        try:
            parse_recipe(recipe)
        except BadInput:  # such as too few micro-batches for a schedule
            continue
        found[name] = recipe
    return found


def predicted(recipe: dict[str, Any], machine: Machine) -> StepTime:
    checked = parse_recipe(recipe)
    return predicted_step(checked, plan_without_weights(checked)[0], machine)


def main(folder: Path, rounds: int) -> list[Row]:
    os.environ["OMP_NUM_THREADS"] = "1"  # a rank has a core, in the bench and in every layout
    tokens = folder / "tokens"
    write_tokens(tokens, count=400_000, vocab_size=MODEL["vocab_size"])
    recipes = drawn(folder, tokens)
    steps: dict[str, list[float]] = {name: [] for name in recipes}
    for number in range(rounds):
        if number == rounds // 2:  # the machine's clock drifts within minutes: between the steps it predicts
            report = measure(folder, device="cpu", only=("speed", "links"), minutes=5)
            (folder / "bench.json").write_text(report_json(report))
        for name, recipe in recipes.items():
            again = recipe | {"out": f"{recipe['out']}-{number}"}
            world = parse_recipe(again).layout.world
            ran = in_ranks(train_steps, world, {"recipe": again, "side": 256}, seconds=300)
            if ran.error:
                raise SystemExit(f"{name}: {ran.error}\n{ran.output}")
            steps[name].append(float(ran.result["figures"]["ms a step"]) / 1e3)
    (folder / "steps.json").write_text(json.dumps(steps))
    machine = machine_from_bench(folder / "bench.json")
    return rows_of({name: predicted(one, machine).seconds for name, one in recipes.items()}, steps)


def rows_of(plans: dict[str, float], steps: dict[str, list[float]]) -> list[Row]:
    """Return a row for each layout, the share of pairs in the right order, and the chosen layout."""
    found = {name: statistics.median(some) for name, some in steps.items()}
    rows = []
    for name, some in steps.items():
        row = at_most(name, [plans[name] / one for one in some], unit="x")
        row.figure = plans[name] / found[name]
        row.details = {"planned, s": plans[name], "measured, s": found[name]}
        rows.append(row)
    apart = [
        (a, b) for a, b in combinations(found, 2) if max(found[a], found[b]) > 1.15 * min(found[a], found[b])
    ]
    right = sum((plans[a] < plans[b]) == (found[a] < found[b]) for a, b in apart)
    share = right / len(apart) if apart else 1.0
    chosen, best = min(plans, key=plans.__getitem__), min(found, key=found.__getitem__)
    worse = found[chosen] / found[best]
    pairs = f"pairs in the right order, of {len(apart)} that differ by 15 %"
    return [
        *rows,
        Row(pairs, share, share, share, "", "1", share == 1),
        at_most(f"chosen ({chosen}) against fastest ({best})", worse, 1.1, "x"),
    ]
