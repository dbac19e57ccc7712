"""Ranks that do not come, or come with something else; that die, hang or run out of memory in a step."""

import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.kills import Campaign, free_port, wait_for
from trilith.cli.app import run
from trilith.models.llama import LlamaBlock
from trilith.parallel_state import launched
from trilith.runs.rendezvous import join
from trilith.system import process_end
from trilith.system.process_end import leave
from trilith.testing import run_fresh


def train_with(arguments, environment, torch_of_rank_1=""):
    """Run this rank's command, which may differ from its neighbour's; without one it never starts."""
    os.environ.update(environment)
    rank = int(os.environ["RANK"])
    if torch_of_rank_1 and rank == 1:
        torch.__version__ = torch_of_rank_1
    end(run(["train", *arguments[rank]]) if arguments[rank] else 0)


def end(code):
    """End a rank as its command does if it failed, or else quickly."""
    if code in (0, 2):
        leave(code)
    process_end.end(code)


def started(*arguments, **environment):
    return run_fresh(
        train_with, len(arguments), list(arguments), environment, process_group=False, timeout=60
    )


@pytest.mark.parametrize(
    ("key", "changes", "of_rank_1"),
    [("recipe", ["optimizer.lr=0.5"], ""), ("torch", [], "2.0.0+odd")],
    ids=["E15-recipes", "E16-packages"],
)
def test_ranks_that_differ_are_refused_by_name(make, key, changes, of_rank_1):
    usual = [str(make(2).recipe), "--quiet", "layout.data=4"]
    arguments = [usual, [*usual, *changes], usual, usual]
    codes = run_fresh(train_with, 4, arguments, {}, of_rank_1, process_group=False, timeout=60)
    assert codes == [2] * 4, [code.output for code in codes]
    says = (
        rf"error: launch: {key}: expected .*{re.escape(of_rank_1)} on rank 1\. Start every rank with the same"
    )
    assert all(re.search(says, code.output) for code in codes), codes[0].output


def meet(folder, seconds_late):
    """Rank 0 comes so long after rank 1, rank 2 never."""
    rank, sign = int(os.environ["RANK"]), Path(folder) / "rank 1 is here"
    if rank == 2:
        return
    if rank == 0:
        wait_for(sign.exists)
        time.sleep(seconds_late)
    else:
        sign.touch()
    here = launched()
    assert here is not None
    join(here, {}, timedelta(seconds=WAITS))


#: Seconds that a rank waits for the others.
WAITS = 1.5


@pytest.mark.parametrize(
    ("late", "blamed"), [(0.5, "rank 2"), pytest.param(3.5, "rank 0", marks=pytest.mark.slow)]
)
def test_a_late_first_rank_is_waited_for_and_the_missing_one_named_E19(tmp_path, late, blamed):
    first, second, _ = run_fresh(meet, 3, str(tmp_path), late, process_group=False, timeout=60)
    assert f"{blamed} missing" in second.output
    # A rank that gave up on rank 0 does not count as present when rank 0 comes.
    assert ("rank 2 missing" if late < WAITS else "ranks 1, 2 missing") in first.output


def test_a_port_in_use_is_refused_E18(make):
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        usual = [str(make(2).recipe), "--quiet", "timeout=1"]
        first, _ = started(usual, [], MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False")
    assert first == 2, first.output
    assert f"MASTER_PORT: expected a free port, found port {port} in use" in first.output


#: Ranks with a store of their own, where they meet: the codes of both ranks, and what they say.
MASTERS = {
    "unknown": ("no-such-host.invalid", [2, 2], [r"MASTER_ADDR: .*found 'no-such-host\.invalid'"] * 2),
    # No machine has this address, and the next leads to this one, so rank 0 may listen there.
    "silent": (
        "240.0.0.1",
        [2, 3],
        [r"MASTER_ADDR: .*found 240\.0\.0\.1", r"rank 0 missing.*240\.0\.0\.1:PORT"],
    ),
    "alone": ("127.0.0.2", [3, 0], ["rank 1 missing", ""]),
    "good": ("localhost", [0, 0], ["", ""]),
}


@pytest.mark.parametrize("master", MASTERS)
def test_a_master_that_does_not_answer_is_one_line_on_each_rank_and_one_that_does_lets_them_train(
    make, master
):
    address, expected, says = MASTERS[master]
    run, port = make(2), str(free_port())
    usual = [str(run.recipe), "--quiet", f"timeout={1 if 3 in expected else 20}"]
    ranks = [usual, [] if master == "alone" else usual]
    codes = started(*ranks, MASTER_ADDR=address, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False")
    assert codes == expected, [code.output for code in codes]
    for code, line in zip(codes, says, strict=True):
        assert re.search(line.replace("PORT", port), code.output) and code.output.count("\n") == (code != 0)
    assert run.steps_saved == [2] * (master == "good")


def test_a_world_that_is_not_the_layout_s_is_refused_on_all_ranks_E10(make):
    run = make(2)
    codes = run.ranks("layout.data=3", "data.global_batch=6", world=2)
    assert codes == [2, 2]
    assert all("expected 3 ranks = data 3, found 2 started" in code.output for code in codes)
    assert not run.out.exists()


IN_A_COLLECTIVE = [
    pytest.param(1, [], id="K2-in-all-reduce"),
    pytest.param(0, [], id="K2b-the-first-rank", marks=pytest.mark.slow),
    pytest.param(
        0,
        ["layout.data=1", "layout.zero=0", "layout.pipeline=2"],
        id="K2c-in-a-pipeline",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("killed", "changes"), IN_A_COLLECTIVE)
def test_a_rank_killed_inside_a_collective_is_named(make, killed, changes):
    """Its peer stands still before the collective until it is dead, so that it is surely inside."""
    run = make(6)
    fault = f"rank={1 - killed};at=step.forward;step=4;act=stop"
    with ThreadPoolExecutor(1) as pool:
        codes = pool.submit(run.ranks, "timeout=40", *changes, fault=fault)
        wait_for(lambda: run.is_at(4, rank=killed) and Campaign.stands(run.pid(1 - killed)))
        time.sleep(0.5)
        os.kill(run.pid(killed), signal.SIGKILL)
        died = time.monotonic()
        os.kill(run.pid(1 - killed), signal.SIGCONT)
        found = codes.result()
    assert found[killed] == -9
    assert found[1 - killed] == 3, found[1 - killed].output
    assert f"a collective failed: rank {killed} died or hangs in step of step 4" in found[1 - killed].output
    assert time.monotonic() - died < 40  # the timeout of a collective whose ranks live
    assert run.steps_saved == [2]
    assert run.ranks(*changes) == [0, 0]


def test_a_rank_that_hangs_is_named_and_all_are_gone_K4(make):
    run = make(6)
    fault = "rank=1;at=step.forward;step=4;act=stop"
    with run.launched("timeout=2", fault=fault, patience=0.5) as process:
        wait_for(lambda: run.is_at(4, rank=0))
        began = time.monotonic()
        code, errors = process.end()
    assert code == 3
    assert "a collective failed: rank 1 died or hangs in step of step" in errors
    assert time.monotonic() - began < 30  # after which torchrun itself kills a rank that does not leave
    assert not Path(f"/proc/{run.pid(1)}").exists()
    assert run.steps_saved == [2]


def test_a_step_longer_than_the_grace_ends_without_a_checkpoint_K13(make):
    run = make(6)
    with ThreadPoolExecutor(1) as pool:
        fault = "rank=1;at=step.forward;step=4;act=sleep:40"
        codes = pool.submit(run.ranks, "grace=0.2", "timeout=30", fault=fault)
        wait_for(lambda: run.is_at(4, rank=1))
        asked = time.monotonic()
        for rank in (0, 1):
            os.kill(run.pid(rank), signal.SIGTERM)
        found = codes.result()
    assert time.monotonic() - asked < 30  # shorter than the step, and than the timeout
    assert found == [3, 3]
    assert "took over 0.2 s" in found[1].output
    assert run.steps_saved == [2]


def parallel(self, x, inputs):
    """A block's feed-forward before its attention, as a bad merge would have it."""
    change = self.mlp(self.mlp_norm(x))
    return x + change + self.attention(self.attention_norm(x), inputs)


def train_with_other_code(arguments):
    if os.environ["RANK"] == "1":
        LlamaBlock.forward = parallel
    end(run(["train", *arguments]))


def test_a_rank_that_sends_in_another_order_stops_the_run_and_both_lines_are_named_K18(make):
    made = make(2)
    words = [str(made.recipe), "layout.data=1", "layout.zero=0", "layout.tensor=2", "debug.collectives=true"]
    codes = run_fresh(train_with_other_code, 2, words, process_group=False, timeout=120)
    assert codes == [3, 3], [code.output for code in codes]
    both = (
        r"collective \d+ of ranks \[0, 1\] differs: "
        r"rank 0 calls all_reduce sum float32 \[.*\] at .*layers/parallel_linear\.py:\d+ "
        r".*layers/attention/attention\.py:\d+ .*models/llama\.py:\d+ .*; "
        r"rank 1 calls all_reduce sum float32 \[.*\] at .*layers/mlp\.py:\d+ .*/test_launch_faults\.py:"
    )
    for rank, code in enumerate(codes):
        assert re.search(both, code.output), code.output
        assert re.search(both, str(made.status(rank)["error"])), made.status(rank)
    assert made.steps_saved == []
