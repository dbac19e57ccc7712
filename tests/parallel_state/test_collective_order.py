"""Collectives that ranks issue differently are caught before they run, with both ranks' lines of code."""

import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.configs import TINY_GPT2
from support.short_runs import run_recipe, tiny_recipe
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import CollectiveOrder, Layout, ParallelState, PeerFailed, engine
from trilith.recipes.recipe import parse_recipe
from trilith.testing import RankError, run_parallel

X = torch.ones(4, 6)


def attention(group, x):
    engine.all_reduce(x, group)


def feed_forward(group, x):
    engine.all_reduce(x, group)


def order(group, odd):
    for one in (feed_forward, attention) if odd else (attention, feed_forward):
        one(group, X)


def shape(group, odd):
    attention(group, X[:2] if odd else X)


def dtype(group, odd):
    attention(group, X.double() if odd else X)


def operator(group, odd):
    if odd:
        engine.all_gather(X, 0, group)
    else:
        engine.all_reduce(X, group)


def reduction(group, odd):
    dist.all_reduce(X.clone(), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM, group=group)


def extra(group, odd):
    if odd:
        feed_forward(group, X)
    dist.all_reduce(X.clone())


def order_and_failure(group, odd):
    order(group, odd)
    raise RuntimeError("asked to fail")


def seeded(wrong, every, timeout):
    """Three good collectives, then those of ``wrong``, which rank 1 does otherwise."""
    state = ParallelState.start(Layout.of(tensor=2))
    with CollectiveOrder(state, interval=every, timeout=timedelta(seconds=timeout)):
        for _ in range(3):
            attention(state.tensor.group, X)
        wrong(state.tensor.group, state.rank == 1)


def said(wrong, every=1, timeout=60):
    with pytest.raises(RankError) as error:
        run_parallel(seeded, 2, wrong, every, timeout)
    causes = [failure.cause for failure in error.value.failures]
    assert all(isinstance(cause, PeerFailed) and cause.exit_code == 3 for cause in causes)
    assert "\n" not in str(causes[0])
    return [str(cause) for cause in causes]


def line(function, text):
    """Return a pattern for the place in this file of the function's line that has this text."""
    source = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    number = next(i for i, one in enumerate(source[first - 1 :], first) if text in one)
    return rf"(?:tests/)?parallel_state/test_collective_order\.py:{number} {function.__name__}"


@pytest.mark.parametrize(
    ("wrong", "ours", "theirs"),
    [
        (order, "all_reduce sum float32 [4, 6]", "all_reduce sum float32 [4, 6]"),
        (shape, "all_reduce sum float32 [4, 6]", "all_reduce sum float32 [2, 6]"),
        (dtype, "all_reduce sum float32 [4, 6]", "all_reduce sum float64 [4, 6]"),
        (operator, "all_reduce sum float32 [4, 6]", "all_gather_into_tensor float32 [4, 6]"),
        (reduction, "allreduce sum float32 [4, 6]", "allreduce max float32 [4, 6]"),
    ],
    ids=["K18-order", "K18-shape", "K18-dtype", "K18-operator", "K18-reduction"],
)
def test_what_differs_is_named_on_both_ranks_K18(wrong, ours, theirs):
    places = {
        order: (line(attention, "engine"), line(feed_forward, "engine")),
        shape: (line(attention, "engine"),) * 2,
        dtype: (line(attention, "engine"),) * 2,
        operator: (line(operator, "engine.all_reduce"), line(operator, "engine.all_gather")),
        reduction: (line(reduction, "dist.all_reduce"),) * 2,
    }[wrong]
    first, second = said(wrong)
    assert first == second, "all ranks say the same"
    pattern = rf"collective 4 of ranks \[0, 1\] differs: rank 0 calls {re.escape(ours)} at {places[0]}.*; "
    assert re.match(pattern + rf"rank 1 calls {re.escape(theirs)} at {places[1]}", first), first


@pytest.mark.parametrize(("wrong", "every"), [(order, 5), (order_and_failure, 9)])
def test_between_rare_comparisons_the_first_call_that_differs_is_named_K18(wrong, every):
    assert all("collective 4 of ranks [0, 1] differs" in one for one in said(wrong, every))


def test_ranks_that_wait_for_each_other_in_two_groups_are_named_with_their_lines_K18():
    first, second = sorted(said(extra, timeout=1))
    assert first.startswith("after 1 s rank 0 waits at collective 1 of ranks [0, 1]: allreduce sum")
    assert "rank 1's last was collective 4 of ranks [0, 1]: all_reduce" in first and "feed_forward" in first
    assert second.startswith("after 1 s rank 1 waits at collective 4")


SELECTIVE = {"checkpointing": "selective"}
LAYOUTS = [
    ({"data": 2, "zero": 3}, {"checkpoint": {"every": 1, "background": True}}),
    (
        {"tensor": 2, "pipeline": 2},
        {"model": {"config": TINY_GPT2}, "memory": SELECTIVE},
    ),
    *(
        pytest.param(layout, {"memory": memory}, marks=pytest.mark.slow)
        for layout, memory in (
            ({"context": 2}, {"loss_chunk": 5}),
            ({"tensor": 2, "sequence": True}, SELECTIVE),
            ({"pipeline": 2}, {"loss_chunk": 5}),
            ({"data": 2, "context": 2, "zero": 2}, {}),
        )
    ),
]


def losses_of(recipes):
    return [[step.loss for step in run_recipe(raw)] for raw in recipes]


@pytest.mark.parametrize(("layout", "more"), LAYOUTS, ids=lambda one: str(one)[:40])
def test_a_run_that_is_right_is_left_alone(layout, more, tmp_path):
    """Two steps, a save, an evaluation and norms raise nothing and change no bit of the losses."""
    tokens, recipes = write_tokens(tmp_path / "tokens"), []
    for on in (False, True):
        changes = {"layout": layout, "steps": 2, "debug": {"collectives": on}, "watch": {"norms": 1}, **more}
        recipes.append(tiny_recipe(tmp_path / f"run{on}", tokens, **changes))
        recipes[-1]["evaluation"] = {"tokens": str(tokens), "every": 1, "samples": 2}
    for plain, watched in run_parallel(losses_of, parse_recipe(recipes[0]).layout.world, recipes):
        assert plain == watched and len(plain) == 2
