"""Ranks that go through a phase together: all have its results, or all raise one error."""

import torch.distributed as dist
from trilith.parallel_state import BadInput, rank_at_fault, together
from trilith.testing import run_parallel


class Stubborn(Exception):
    """Define an error that pickle cannot rebuild: it takes two arguments and keeps one."""

    def __init__(self, what, whose):
        super().__init__(what)


def outcome_of(failing):
    rank = dist.get_rank()

    def work():
        error = failing.get(rank)
        if error == "stubborn":
            raise Stubborn("no", object())
        if isinstance(error, Exception):
            raise error
        return rank

    try:
        return str(together(work, world=3, group=None)), "", -1
    except Exception as error:
        return type(error).__name__, str(error), rank_at_fault(error, here=rank)


def test_all_have_the_results_or_the_error_of_the_lowest_rank():
    assert run_parallel(outcome_of, 3, {}) == [("[0, 1, 2]", "", -1)] * 3
    bad = BadInput("here", "key", expected="one", found="two")
    found = run_parallel(outcome_of, 3, {1: bad, 2: ValueError("later")})
    assert found == [("BadInput", str(bad), 1)] * 3


def test_an_error_that_cannot_travel_is_told_in_words():
    """Otherwise the exchange itself would fail on one rank while the others wait."""
    assert run_parallel(outcome_of, 3, {2: "stubborn"}) == [("RuntimeError", "Stubborn: no", 2)] * 3
