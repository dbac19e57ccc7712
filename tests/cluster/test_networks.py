"""Hosts with networks of their own on this machine: a link is cut in a step, a link is slow."""

import json
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
def network(request, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        with hosts(request.param) as made:
            yield made
    except NoNetworks as reason:
        # Only root with CAP_NET_ADMIN may make them; test_nodes.py judges links by measured numbers without.
        pytest.skip(f"this machine lets us make no network namespaces: {reason}")


def lives(pid):
    info = process_info(pid)
    return info is not None and info.alive


def start_all(network, words, folder):
    return [
        network.start(name, network.torchrun(name, words), folder / f"{name}.log") for name in network.names
    ]


@pytest.mark.parametrize("network", [2], indirect=True)
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


def compare(network, folder, *options):
    words = ["trilith", "doctor", "--nodes", "--json", *options, str(folder)]
    for one in start_all(network, words, folder):
        one.wait(120)
    text = (folder / "node1.log").read_text()
    return json.JSONDecoder().raw_decode(text[text.index("{\n") :])[0]


def named(found):
    return [one["check"] for one in found["findings"] if one["group"] == "links" and one["level"] == "fault"]


@pytest.mark.parametrize("network", [3], indirect=True)
def test_the_node_with_the_slow_link_is_named(network, tmp_path):
    assert compare(network, tmp_path)["exclude"] == []
    network.slow("node3", 50)
    found = compare(network, tmp_path)
    print(f"\n{[(link['first'], link['second'], link['rate']) for link in found['links']]}")
    assert {*named(found)} >= {"node3", "node1 - node3", "node2 - node3"} and found["exclude"] == ["node3"]


@pytest.mark.parametrize("network", [2], indirect=True)
def test_a_slow_link_of_two_nodes_is_named_by_the_rate_that_it_should_have(network, tmp_path):
    assert named(compare(network, tmp_path, "--gbits", "1")) == []
    network.slow("node1", 50)
    assert named(compare(network, tmp_path, "--gbits", "1")) == ["node1 - node2"]
