"""Hosts with networks of their own on this machine: a link is cut in a step."""

import os
import sys
import time
from pathlib import Path

import pytest
from support.kills import wait_for
from support.networks import NoNetworks, hosts
from support.short_runs import losses, tiny_recipe, train, write_recipe
from trilith.machine.random_files import write_tokens
from trilith.runs.heartbeat import all_status, status_folder
from trilith.system.process_info import process_info

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TIMEOUT = 10.0


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        with hosts(2) as made:
            yield made
    except NoNetworks as reason:
        # Only root with CAP_NET_ADMIN may make them; test_flight_recorder.py judges records without.
        pytest.skip(f"this machine lets us make no network namespaces: {reason}")


def lives(pid):
    info = process_info(pid)
    return info is not None and info.alive


def start_all(network, words, folder):
    return [
        network.start(name, network.torchrun(name, words), folder / f"{name}.log") for name in network.names
    ]


def test_a_link_that_is_cut_in_a_step_is_named_and_the_run_goes_on_when_it_is_back(network, tmp_path):
    out = tmp_path / "run"
    tokens = write_tokens(tmp_path / "tokens", count=40_000)
    raw = tiny_recipe(out, tokens, steps=400, layout={"data": 2}, timeout=TIMEOUT)
    raw["checkpoint"] = {"every": 20, "keep": 2}
    words = ["trilith", "train", str(write_recipe(tmp_path / "recipe.toml", raw))]

    def logs():
        return "\n".join(path.read_text() for path in tmp_path.glob("*.log"))

    def steps():
        path = out / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    running = start_all(network, words, tmp_path)
    wait_for(lambda: steps() > 30, 200, "30 steps")
    network.cut("node2")
    stopped = steps()

    def ended():
        return [status.code for status in all_status(status_folder(out))] == [3, 3]

    began = time.monotonic()
    wait_for(ended, TIMEOUT + 5, "the ranks' word that they failed")
    seconds = time.monotonic() - began
    told = [status.error for status in all_status(status_folder(out))]
    print(f"\nnamed {seconds:.1f} s after the cut: {told}")
    assert all("all ranks have called it, so the network failed" in one for one in told)
    ranks = [status.pid for status in all_status(status_folder(out))]
    wait_for(lambda: not any(map(lives, ranks)), 40, "the end of ranks that failed")
    assert 30 < stopped < raw["steps"]

    network.restore("node2")  # which lets torchrun's two agents, which wait for each other, end
    wait_for(lambda: all(one.poll() is not None for one in running), 120, "the end of torchrun")
    assert all(one.returncode for one in running)
    again = start_all(network, words, tmp_path)
    wait_for(lambda: all(one.poll() is not None for one in again), 200, "the end of the resumed run")
    assert [one.returncode for one in again] == [0, 0], logs()
    assert "resumed from" in logs()
    train(raw | {"out": str(tmp_path / "whole")})
    assert losses(out) == losses(tmp_path / "whole")
