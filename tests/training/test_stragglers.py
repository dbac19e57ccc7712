"""The rank that the others wait for is named, though all ranks end their steps together."""

import json
import socket
import time
from unittest import mock

import pytest
import torch.distributed as dist
from support.short_runs import losses, run_recipe, tiny_recipe
from trilith.runs.metrics import StepMetrics, read_metrics
from trilith.runs.report.page import make_report
from trilith.runs.report.record import read_run
from trilith.runs.terminal import Terminal
from trilith.testing import run_parallel
from trilith.training import trainer
from trilith.training.stragglers import slowest_of


def run_with_a_late_rank(raw, hosts=None):
    """Run with rank 1 late in step 2, the one that is measured, and the ranks on these hosts, if several;
    return whether torch is as it was.
    """

    def late(point, *, rank, step):
        if point == "step.forward" and rank == 1 and step == 2:
            time.sleep(0.5)

    before = dist.Work.wait
    with mock.patch.object(trainer, "fault", late), pytest.MonkeyPatch.context() as patch:
        if hosts is not None:
            patch.setattr(socket, "gethostname", lambda: hosts[dist.get_rank()])
        run_recipe(raw)
    return dist.Work.wait is before


LAYOUTS = [{"data": 2, "zero": 3}, {"pipeline": 2}, pytest.param({"tensor": 2}, marks=pytest.mark.slow)]


@pytest.mark.parametrize("hosts", [None, ["a", "b"]], ids=["one host", "two hosts"])
def test_unless_asked_a_slow_rank_is_named_among_several_hosts_alone(tmp_path, tokens, hosts):
    """CPU ranks of one host take its cores from each other, and no rank is to blame."""
    raw = tiny_recipe(tmp_path / "late", tokens, steps=3, log_every=2, layout={"data": 2})
    assert run_parallel(run_with_a_late_rank, 2, raw, hosts) == [True, True]
    named = [line.get("slow_host") for line in read_metrics(tmp_path / "late" / "metrics.jsonl")]
    assert named == [None, "b" if hosts else None, None]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_rank_that_sleeps_is_named_with_its_host(tmp_path, tokens, layout):
    raw = tiny_recipe(
        tmp_path / "late", tokens, steps=3, log_every=2, layout=layout, watch={"slow_rank": 2.0}
    )
    assert run_parallel(run_with_a_late_rank, 2, raw) == [True, True]
    lines = read_metrics(tmp_path / "late" / "metrics.jsonl")
    named = [(line.get("slow_rank"), line.get("slow_host")) for line in lines]
    assert named == [(None, None), (1, socket.gethostname()), (None, None)]
    assert lines[1]["slow_times"] > 2.0
    if layout.get("zero"):
        unseen = tiny_recipe(tmp_path / "unseen", tokens, steps=3, layout=layout, watch={"slow_rank": 0.0})
        run_parallel(run_recipe, 2, unseen)
        assert losses(tmp_path / "late") == losses(tmp_path / "unseen")
        page = make_report([read_run(tmp_path / "late")])
        assert f"rank 1 on {socket.gethostname()}: 1 time, up to" in page


def test_ranks_are_compared_with_those_that_do_the_same_work():
    assert slowest_of([1.0, 1.0, 4.0, 5.0], [0, 0, 1, 1]) == (3, 1.25)
    assert slowest_of([1.0, 3.0], [0, 0]) == (1, 3.0)
    assert slowest_of([1.0, 1.5, 1.0], [0, 1, 2]) == (1, 1.5)  # each stage is one rank
    assert slowest_of([0.0, 0.0], [0, 0]) == (0, 1.0)


def test_the_terminal_names_the_slow_rank(capsys):
    slow = StepMetrics(
        0, 2.5, 0.75, 3e-4, 4096, 12_345.6, 0.33, slow_rank=3, slow_host="node17", slow_times=2.44
    )
    Terminal(steps=2, interval=1).step(slow)
    assert "slow: rank 3 on node17, 2.4 x  " in capsys.readouterr().out


def test_a_report_lists_slow_ranks_by_how_often_they_were_slow(tmp_path):
    step = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 16, "tokens_per_second": 1.0, "seconds": 1.0}
    slow = [(1, "a", 3.0), (5, "b", 2.0), (5, "b", 2.5)]
    lines = [
        {"step": number, **step, "slow_rank": rank, "slow_host": host, "slow_times": times}
        for number, (rank, host, times) in enumerate(slow)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(tmp_path).slow_ranks == [
        *("rank 5 on b: 2 times, up to 2.5 x the median", "rank 1 on a: 1 time, up to 3.0 x the median")
    ]


def test_one_rank_is_compared_with_nobody(tmp_path, tokens):
    raw = tiny_recipe(tmp_path / "one", tokens, steps=2, log_every=1, watch={"slow_rank": 0.001})
    run_parallel(run_recipe, 1, raw)
    assert not any("slow_rank" in line for line in read_metrics(tmp_path / "one" / "metrics.jsonl"))
