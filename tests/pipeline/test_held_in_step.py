"""A pipeline rank holds in a step what one counts by hand; few micro-batches show what a long step holds."""

from random import Random

import pytest
from trilith.parallel_state import Layout
from trilith.pipeline import layout_of, schedule_kind
from trilith.pipeline.held_in_step import HeldInStep, _states, _with_messages
from trilith.pipeline.schedule_actions import actions
from trilith.pipeline.timetable import most_held

SEVERAL = ("interleaved", "interleaved-zero-bubble", "zbv", "dualpipev")


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("seed", range(6))
def test_few_micro_batches_and_what_further_ones_send_are_the_whole_step(name, seed):
    draw = Random(seed)
    pipeline, rounds = draw.choice([2, 3, 4, 8, 9]), draw.choice([2, 4, 5, 8])
    own = draw.choice([2, 3, 4]) if name.startswith("interleaved") else 2
    layout = Layout.of(pipeline=pipeline, virtual_stages=own, v_shape=layout_of(name, 4).v_shape)
    # An interleaved schedule's rounds may have more micro-batches than the pipeline has ranks.
    odd = (
        draw.choice([0, rounds * (rounds < pipeline)])
        if name.startswith("interleaved")
        else draw.randrange(pipeline)
    )
    shape = name, pipeline, own, layout.v_shape, rounds * pipeline + odd
    for rank in range(pipeline):
        whole = [draw.uniform(0, 100) for _ in range(own)]
        halfway = [draw.uniform(-20, 60) for _ in range(own)]
        message = draw.choice([0.0, 1.0, 5.0])
        weights = [*whole, *halfway, message, 0.0]
        every = {}
        for key, row in _states(_with_messages(*shape)[rank], layout, rank):
            every.setdefault(key, set()).add(row)
        expected = {
            key: max(sum(a * b for a, b in zip(row, weights, strict=True)) for row in rows)
            for key, rows in every.items()
        }
        instants = HeldInStep(name, layout, shape[-1], rank, whole, halfway, message).heaviest()
        assert {(at.kind, at.stage, at.absent): at.bytes for at in instants} == pytest.approx(
            {
                (kind, stage, absent): held
                for (kind, stage, absent), held in expected.items()
                if not absent or held > expected.get((kind, stage, ()), -1.0)
            }
        )


@pytest.mark.parametrize("name", SEVERAL)
def test_the_micro_batches_at_the_worst_instant_are_those_of_the_timetable(name):
    """Without messages, the most that is held is counted action by action (``most_held``)."""
    layout = layout_of(name, 4)
    ranks = actions(name, layout.pipeline, layout.virtual_stages, layout.v_shape, 16)
    for rank in range(4):
        whole, halfway = most_held(ranks[rank])
        found = HeldInStep(name, layout, 16, rank, [2.0, 2.0], [1.0, 1.0], 0.0).heaviest()
        assert max(one.bytes for one in found) == 2 * whole + halfway
        assert schedule_kind(name).two_backwards or all(one.kind != "W" for one in found)


def test_1f1b_and_gpipe_by_hand():
    """The first of four ranks holds four micro-batches with 1F1B, and the gradient that it receives."""
    layout = Layout.of(pipeline=4)
    (first,) = HeldInStep("1f1b", layout, 8, 0, [10.0], [0.0], 1.0).heaviest()
    assert (first.kind, first.stage, first.messages, first.bytes) == ("B", 0, 2, 42)
    last = {
        instant.kind: instant for instant in HeldInStep("1f1b", layout, 8, 3, [10.0], [0.0], 1.0).heaviest()
    }
    assert {kind: one.bytes for kind, one in last.items()} == {"B": 11, "F": 11}
    every = HeldInStep("gpipe", layout, 8, 1, [10.0], [0.0], 1.0).heaviest()
    assert [(one.bytes, one.absent) for one in every] == [(81, (0,)), (72, ())]


def test_gradients_are_absent_until_a_stage_has_had_a_backward():
    """With few micro-batches all forwards come before the first backward."""
    for name in ("gpipe", "1f1b"):
        first = HeldInStep(name, Layout.of(pipeline=4), 4, 0, [10.0], [0.0], 1.0).heaviest()
        assert [(one.bytes, one.absent) for one in first] == [(41, (0,)), (31, ())]
    for micro_batches, backwards in ((1, [(0,)]), (2, [(0,), ()])):
        alone = HeldInStep("1f1b", Layout(), micro_batches, 0, [10.0], [0.0], 0.0).heaviest()
        expected = [*(("B", absent) for absent in backwards), ("F", backwards[-1])]
        assert [(one.kind, one.absent) for one in alone] == expected
    layout = Layout.of(pipeline=2, virtual_stages=2)
    few = HeldInStep("interleaved", layout, 2, 0, [10.0, 10.0], [0.0, 0.0], 1.0).heaviest()
    absent_at = [(one.stage, one.absent) for one in few]
    assert absent_at == [(2, (0, 1)), (2, (0,)), (0, (0,)), (0, ())] and few[0].bytes == 41
