"""The planner's collectives by hand; ``tests/layouts`` compares them with what ranks send."""

import re
from pathlib import Path

from trilith.layers import cost_of
from trilith.models import family_of
from trilith.parallel_state import Layout, ParallelState
from trilith.planner import Traffic, Work, block_traffic, step_traffic

LLAMA = {
    "model_type": "llama",
    "vocab_size": 503,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
LENGTH, SAMPLES = 12, 2


def of_kinds(every):
    found = {}
    for one in every:
        count, size = found.get(one.kind, (0, 0))
        found[one.kind] = (count + one.count, size + one.bytes)
    return found


def test_a_block_s_table_is_the_formula():
    """docs/communication.md, evaluated: each cell is what a block says that it sends."""
    text = (Path(__file__).parents[2] / "docs" / "communication.md").read_text()
    rows = re.findall(r"^\| (tensor(?: and sequence)?) \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["tensor", "tensor and sequence"]
    for (name, *cells), sequence in zip(rows, (False, True), strict=True):
        state = ParallelState.stand_in(Layout.of(tensor=4, sequence=sequence))
        work = Work(state, 24, LENGTH, SAMPLES, 1, compute=2)
        block = family_of(LLAMA).build(_CONFIG, state=state).layers["0"]
        sent = block_traffic(work, cost_of(block, work.tokens))
        numbers = {"N D": SAMPLES * LENGTH * 24, "N D / t": SAMPLES * LENGTH * 24 // 4}
        for cell, forward in zip(cells, (True, False), strict=True):
            stated = {}
            for count, kind, size in re.findall(
                r"(\d) (all-reduce|all-gather|reduce-scatter)s of ([^,]+)", cell
            ):
                stated[kind.replace("-", "_")] = (int(count), int(count) * numbers[size] * 2)
            here = [one for one in sent if one.what == ("forward" if forward else "backward")]
            assert stated and of_kinds(here) == stated, name


_CONFIG = family_of(LLAMA).from_hf(LLAMA)


def test_over_one_rank_of_an_axis_nothing_is_sent():
    family = family_of(LLAMA)
    model = family.build(_CONFIG, state=ParallelState.stand_in(Layout()))
    work = Work(model.state, 24, LENGTH, SAMPLES, 2)
    assert step_traffic(work, model) == []


def test_a_ring_sends_the_shares_of_the_others():
    wires = {
        kind: Traffic("tensor", kind, "", 1, 1000, 4).wire
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "send")
    }
    assert wires == {"all_reduce": 1500, "all_gather": 3000, "reduce_scatter": 750, "send": 1000}
