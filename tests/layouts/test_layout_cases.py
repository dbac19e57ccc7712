"""Check the harness: who fails when the ranks of a call of several rows fail, and what the parent finds."""

from types import SimpleNamespace

import pytest
import torch
from support import layout_cases
from support.configs import config
from support.layout_cases import SENT, Layouts, RankRecord, Row, assembled, axes, digest
from support.plans import plan_of, plans_of
from support.short_training import Case
from trilith.parallel_state import Box, Layout
from trilith.ranks.failures import RankFailure
from trilith.testing import RankError

ROWS = [Row(why, Case({}, Layout.of(tensor=2)), **SENT) for why in ("first", "second", "third")]


def records_of(row):
    return [RankRecord(sent={("tensor", "send"): (1, len(row.why))}) for _ in range(2)]


@pytest.fixture
def calls(monkeypatch):
    """Stand in for ranks; ``broken`` says whether a call of these rows fails. Returns the calls made."""
    seen = SimpleNamespace(rows=[], broken=lambda names: False)

    def run_parallel(function, world, rows, folder, timeout):
        names = [row.why for row in rows]
        seen.rows.append(names)
        if seen.broken(names):
            failure = RankFailure(0, "raised", 0.0, "raised", output="row 'first'\nrow 'second'\n")
            raise RankError([failure], f"a rank failed in {names}")
        return list(zip(*map(records_of, rows), strict=True))

    def chosen(request):
        return ROWS

    monkeypatch.setattr(layout_cases, "run_parallel", run_parallel)
    monkeypatch.setattr(layout_cases, "plans_of", lambda case, **asked: [])
    monkeypatch.setattr(layout_cases, "_chosen", chosen)
    return seen


def outcomes(layouts):
    """Return what each row's question gives: nothing, or the error."""
    found = {}
    for row in ROWS * 2:
        try:
            found[row.why] = len(layouts.record(row, object()).ranks)
        except (RankError, AssertionError) as error:
            found[row.why] = str(error)
    return found


def test_rows_run_in_one_call_and_once(calls):
    assert outcomes(Layouts(ROWS)) == {"first": 2, "second": 2, "third": 2}
    assert calls.rows == [["first", "second", "third"]]


def test_a_table_runs_no_row_of_another_table_of_its_file(calls):
    table = Layouts(ROWS[:2])
    table.record(ROWS[0], object())
    assert calls.rows == [["first", "second"]]


def test_the_row_that_breaks_a_call_fails_with_its_own_error_and_its_neighbours_pass(calls):
    calls.broken = lambda names: "second" in names
    found = outcomes(Layouts(ROWS))
    assert (found["first"], found["third"]) == (2, 2)
    assert "a rank failed in ['second']" in found["second"]
    assert calls.rows == [["first", "second", "third"], ["first"], ["second"], ["third"]]


def test_rows_that_pass_alone_but_not_together_are_a_failure(calls):
    calls.broken = lambda names: len(names) > 1
    found = outcomes(Layouts(ROWS))
    assert (found["first"], found["second"]) == (2, 2)
    assert "but not in one call, which failed at row 'second'" in found["third"]


def test_a_copy_that_differs_and_an_element_without_an_owner_are_found():
    whole, box = torch.arange(4.0), Box.whole((4,))
    half = Box((0,), (2,))
    assert torch.equal(assembled([{"w": (box, whole)}, {"w": (half, digest(whole[:2]))}])["w"], whole)
    with pytest.raises(AssertionError, match="a copy differs"):
        assembled([{"w": (box, whole)}, {"w": (half, digest(whole[:2] + 1))}])
    with pytest.raises(AssertionError, match="not every element has exactly one owner"):
        assembled([{"w": (half, whole[:2])}, {"w": (box, digest(whole))}])


@pytest.mark.parametrize(
    ("model", "cut", "more"),
    [
        ("deepseek_v3", "tp2-sp-pp2", {}),
        ("gemma2", "cp2-ring-dp2-zero3", {}),
        ("mixtral", "dp2-ep2-zero2", {"frozen": r"^layers\.0\b"}),
        ("held/llama", "tp2-dp2", {"lora": {"r": 3}}),  # its vocabulary is not padded
    ],
)
def test_shared_traces_give_the_plan_that_a_rank_makes_for_itself(model, cut, more):
    """The last rank is at another place on each axis than the first, whose traces are shared."""
    case, asked = Case(config(model), Layout.of(**axes(cut)), **more), {"sends": True, "holds": True}
    shared = plans_of(case, **asked)
    assert len(shared) == case.layout.world
    assert shared[-1] == plan_of(case, case.layout.world - 1, **asked)
    assert shared[-1].sends and shared[-1].peak and all(shared[-1].elements)
