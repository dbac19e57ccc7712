"""`trilith train` with context ranks: a recipe, its evaluation, its checkpoint, as without them."""

from typing import TYPE_CHECKING

import pytest
from trilith.runs.metrics import read_metrics

if TYPE_CHECKING:
    pass


def test_a_run_with_context_ranks_is_the_run_without_them(make):
    run = make(3)
    evaluated = [f"evaluation.tokens={run.out.parent / 'tokens'}", "evaluation.every=3"]
    options = {
        "plain": ["layout.data=1", "layout.zero=0", "data.documents=separate"],
        "context": [
            "layout.data=1",
            "layout.context=2",
            "layout.ring=true",
            "memory.checkpointing=selective",
            "data.documents=separate",
        ],
    }
    found = {}
    for name, chosen in options.items():
        out = run.out.parent / name
        world = 2 if name == "context" else 1
        codes = run.ranks(f"out={out}", *chosen, *evaluated, world=world)
        assert codes == [0] * world
        found[name] = list(read_metrics(out / "metrics.jsonl"))
    for one, other in zip(found["plain"], found["context"], strict=True):
        for key in ("loss", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-4)
    last, same = (lines[-1]["evaluation_loss"] for lines in found.values())
    assert last == pytest.approx(same, rel=1e-4)
