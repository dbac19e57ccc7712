"""run_parallel: ranks that raise, hang and die are named, at once, and the next call works."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from trilith.parallel_state import BadInput, PeerFailed
from trilith.ranks import pool, processes
from trilith.ranks.failures import RankFailure
from trilith.testing import RankError, run_fresh, run_parallel


class Stubborn(Exception):
    """Define an exception that pickles, but cannot be rebuilt from its message alone."""

    def __init__(self, code, *, reason):
        super().__init__(f"{code} {reason}")


@pytest.fixture(autouse=True, scope="module")
def workers():
    """Started before anything is timed."""
    run_parallel(get_pid, 4)


def get_pid():
    return os.getpid()


def test_a_rank_that_was_told_of_another_s_error_comes_after_it():
    told = RankFailure(0, "raised", 1.0, "raised PeerFailed", cause=PeerFailed("rank 1 failed"))
    assert RankError([told, RankFailure(1, "raised", 2.0, "raised OSError", cause=OSError())]).rank == 1


def raise_on(rank, delay=0.0):
    dist.barrier()  # whoever leaves while gloo still connects the ranks can leave the others hanging
    if dist.get_rank() == rank:
        time.sleep(delay)
        raise BadInput("rank", rank, expected="none")
    dist.barrier()


def raise_in_turn(order):
    time.sleep(0.4 * order.index(dist.get_rank()))
    raise ValueError(f"turn of rank {dist.get_rank()}")


def raise_stubbornly():
    raise Stubborn(3, reason="obstinate")


def return_early(rank):
    if dist.get_rank() != rank:
        dist.barrier()


def hang_on(rank):
    if dist.get_rank() == rank:
        time.sleep(1000)
    dist.barrier()


def stop_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    return os.getpid()


def fail_and_hang():
    if dist.get_rank() == 0:
        raise ValueError("at once")
    time.sleep(1000)


def die_on(rank, how):
    dist.barrier()  # as in raise_on
    if dist.get_rank() == rank:
        print("last words")
        os.kill(os.getpid(), how) if how else os._exit(7)
    dist.barrier()


def mismatch():
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


def exits():
    sys.exit("enough")


def test_a_rank_that_raises_is_named_with_its_traceback_and_its_exception_and_workers_survive_it():
    before = run_parallel(get_pid, 4)
    with pytest.raises(RankError) as caught:
        run_parallel(raise_on, 4, 2)
    error = caught.value
    kinds = [failure.kind for failure in error.failures]
    assert kinds == ["raised"] * 4, "the others' collectives break at once"
    assert error.rank == 2
    assert str(error).startswith("rank 2 raised trilith.system.errors.BadInput: rank: 2: expected none")
    assert ", in raise_on" in str(error) and "Traceback (most recent call last)" in str(error)
    assert isinstance(error.cause, BadInput) and error.cause.expected == "none"
    assert error.__cause__ is error.cause
    assert sorted(failure.rank for failure in error.failures) == [0, 1, 2, 3], "all ranks have their say"
    assert run_parallel(get_pid, 4) == before


def test_the_rank_that_failed_first_in_time_comes_first():
    with pytest.raises(RankError) as caught:
        run_parallel(raise_in_turn, 3, (2, 0, 1))
    assert [failure.rank for failure in caught.value.failures] == [2, 0, 1] and caught.value.rank == 2
    assert str(caught.value).startswith("rank 2 raised ValueError: turn of rank 2")


def test_what_cannot_be_rebuilt_and_sys_exit_are_failures_and_not_deaths():
    with pytest.raises(RankError, match="3 obstinate") as caught:
        run_parallel(raise_stubbornly, 1)
    assert caught.value.cause is None
    with pytest.raises(RankError, match="raised SystemExit: enough"):
        run_parallel(exits, 2)


def test_where_torch_compares_them_a_mismatched_collective_is_named(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    codes = run_fresh(mismatch, 2)
    assert any("Detected mismatch between collectives" in code.output for code in codes), codes[0].output


def test_a_hang_names_the_ranks_and_shows_where_they_are_and_the_next_call_works():
    before = run_parallel(get_pid, 3)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"did not answer within 1 s") as caught:
        run_parallel(hang_on, 3, 1, timeout=1.0)
    assert 1.0 <= time.monotonic() - start < 1.0 + pool.GRACE + 2
    text = str(caught.value)
    assert text.startswith("ranks 0, 1, 2 did not answer within 1 s")
    culprit = next(failure for failure in caught.value.failures if failure.rank == 1)
    assert "hang_on" in culprit.output and "barrier" not in culprit.output
    victim = next(failure for failure in caught.value.failures if failure.rank == 2)
    assert "barrier" in victim.output
    after = run_parallel(get_pid, 3)
    assert not set(before) & set(after), "hung workers are replaced"
    assert not [pid for pid in before if os.path.exists(f"/proc/{pid}")], "and ended"


@pytest.mark.parametrize(
    ("function", "world", "silent"),
    [(stop_on, 2, [1]), (return_early, 3, [0, 2])],
    ids=["stopped", "waiting"],
)
def test_a_rank_that_is_stopped_or_waits_for_one_that_returned_is_named_and_ended(
    function, world, silent, monkeypatch
):
    monkeypatch.setattr(processes, "TRACE", 0.3)  # which a stopped rank lets pass
    before = run_parallel(get_pid, world)
    with pytest.raises(RankError, match=r"^ranks? [\d, ]+ did not answer within 1 s") as caught:
        run_parallel(function, world, 1, timeout=1.0)
    assert [failure.rank for failure in caught.value.failures] == silent
    assert not [rank for rank in silent if os.path.exists(f"/proc/{before[rank]}")]


def test_a_rank_stuck_while_another_has_failed_does_not_hold_up_the_report(monkeypatch):
    monkeypatch.setattr(pool, "GRACE", 0.5)
    run_parallel(get_pid, 2)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_parallel(fail_and_hang, 2)
    assert time.monotonic() - start < pool.GRACE + 2
    assert caught.value.rank == 0 and str(caught.value).startswith("rank 0 raised ValueError")
    assert [failure.kind for failure in caught.value.failures] == ["raised", "silent"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (0, "rank 1 died with exit code 7"),
        (signal.SIGKILL, "rank 1 was killed by SIGKILL"),
        (signal.SIGABRT, "rank 1 was killed by SIGABRT"),
    ],
)
def test_a_death_is_reported_at_once_with_its_rank_and_signal(how, words):
    run_parallel(get_pid, 3)
    with pytest.raises(RankError) as caught:
        run_parallel(die_on, 3, 1, how)
    kinds = [failure.kind for failure in caught.value.failures]
    assert kinds == ["died", "raised", "raised"], "neither the timeout nor the grace passed"
    assert caught.value.rank == 1
    assert str(caught.value).startswith(words)
    assert "last words" in caught.value.failures[0].output
    # A crash in C++ says where in Python it was called.
    assert ("in die_on" in caught.value.failures[0].output) == (how == signal.SIGABRT)
    assert len(set(run_parallel(get_pid, 3))) == 3
