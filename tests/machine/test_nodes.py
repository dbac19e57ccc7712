"""The comparison of nodes: it names the slow, the different and the silent one, and no other."""

import json
import os
import time
from contextlib import redirect_stdout
from datetime import timedelta
from itertools import combinations
from pathlib import Path

import pytest
from trilith.cli.app import run
from trilith.cluster import EXCLUDED_NODES, exclude_nodes
from trilith.machine.doctor import disk
from trilith.machine.doctor.disk import Folder, measure_folder
from trilith.machine.nodes import links, preflight
from trilith.machine.nodes.judge import judge
from trilith.machine.nodes.links import Link, rounds
from trilith.system.process_end import leave
from trilith.testing import run_fresh

GOOD = {"free": 10**11, "written": 2e9, "read": 3e9, "error": ""}


def cards(count, **odd):
    """Nodes a, b, c, ... that are alike but for those named in ``odd``."""
    made = []
    for name in "abcdefgh"[:count]:
        change = odd.get(name, {})
        alike = {"python": "3.11.2", "torch": "2.13.0", "GPUs": "8 x H100"} | change.get("facts", {})
        made.append({"name": name, "facts": alike, "folders": {"/runs": GOOD | change.get("folder", {})}})
    return made


def meshed(count, **changes):
    """A link between each two nodes; ``changes`` names two nodes, such as ``ab``."""
    usual = {"rate": 1e10, "latency": 20e-6, "ahead": 1e-4}
    pairs = combinations(range(count), 2)
    return [Link(a, b, **usual | changes.get("abcdefgh"[a] + "abcdefgh"[b], {})) for a, b in pairs]


def faults(verdict):
    return [one.check for one in verdict.findings if one.level == "fault"]


SLOW, GONE = {"rate": 1e9}, {"error": "Connection refused", "rate": 0.0}


@pytest.mark.parametrize(
    ("count", "odd", "exclude", "faulty"),
    [
        (4, {}, [], []),
        (4, {"c": {"facts": {"torch": "2.12.0"}}}, ["c"], ["torch on c"]),
        (4, {"b": {"facts": {"GPUs": "7 x H100"}}}, ["b"], ["GPUs on b"]),
        (4, {"a": {"folder": {"written": 1e8}}}, ["a"], ["/runs on a"]),
        (4, {"d": {"folder": {"error": "Read-only file system"}}}, ["d"], ["/runs on d"]),
        (2, {"b": {"facts": {"torch": "2.12.0"}}}, [], ["torch on b"]),  # nothing tells which is right
    ],
)
def test_a_node_that_differs_or_has_a_slow_disk_is_left_out(count, odd, exclude, faulty):
    verdict = judge(cards(count, **odd), meshed(count))
    assert verdict.exclude == exclude and faults(verdict) == faulty


@pytest.mark.parametrize(
    ("count", "bad", "gbits", "exclude", "faulty"),
    [
        (4, {"ac": SLOW, "bc": SLOW, "cd": SLOW}, None, ["c"], ["c", "a - c", "b - c", "c - d"]),
        (4, {"ac": GONE, "bc": GONE, "cd": GONE}, None, ["c"], ["c", "a - c", "b - c", "c - d"]),
        (3, {"ac": GONE, "bc": SLOW}, None, ["c"], ["c", "a - c", "b - c"]),
        (4, {"bd": GONE}, None, [], ["b - d"]),
        (2, {"ab": GONE}, None, [], ["a - b"]),
        (2, {"ab": SLOW}, None, [], []),  # nothing tells what is usual
        (2, {"ab": SLOW}, 10, [], []),
        (2, {"ab": SLOW}, 100, [], ["a - b"]),
    ],
)
def test_bad_links_name_both_ends_and_a_node_with_most_of_them_is_left_out(
    count, bad, gbits, exclude, faulty
):
    verdict = judge(cards(count), meshed(count, **bad), gbits=gbits)
    assert verdict.exclude == exclude and faults(verdict) == faulty
    if gbits and faulty:
        assert "expected 6.25 GB/s or more" in verdict.findings[-2].found


def test_a_clock_that_is_off_is_told_also_if_it_is_the_first_node_s():
    for ahead, who in (({"ac": {"ahead": 7.0}}, "c"), ({n: {"ahead": 7.0} for n in ("ab", "ac", "ad")}, "a")):
        verdict = judge(cards(4), meshed(4, **ahead))
        (told,) = [one for one in verdict.findings if one.group == "clock"]
        assert (told.level, told.check) == ("warning", who) and verdict.exclude == []


def test_a_full_disk_and_a_long_latency_are_warnings_that_leave_nobody_out():
    verdict = judge(cards(4, d={"folder": {"free": 10**9}}), meshed(4, bc={"latency": 2e-3}))
    warned = [(one.group, one.check) for one in verdict.findings if one.level == "warning"]
    assert warned == [("folders", "/runs on d"), ("links", "b - c")]
    assert faults(verdict) == verdict.exclude == []


@pytest.mark.parametrize("count", range(1, 8))
def test_each_two_nodes_meet_once_and_nobody_is_in_two_pairs_at_a_time(count):
    seen = [*rounds(count)]
    for pairs in seen:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends))
    met = [pair for pairs in seen for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]


def test_a_folder_is_measured_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_WRITTEN", 2 << 20)
    found = measure_folder(tmp_path)
    assert found.written > 0 and found.read > 0 and found.free > 0 and not [*tmp_path.iterdir()]
    assert measure_folder(tmp_path / "none") == Folder(error="No such file or directory")


def test_the_list_of_nodes_keeps_its_lines_and_has_each_name_once(tmp_path):
    (tmp_path / EXCLUDED_NODES).write_text("node9\n")
    for names in (["node1", "node9"], ["node1", "node2"]):
        exclude_nodes(tmp_path, names)
    assert (tmp_path / EXCLUDED_NODES).read_text() == "node9\nnode1\nnode2\n"
    assert [path.name for path in tmp_path.iterdir()] == [EXCLUDED_NODES]


def odd_node(folder):
    """Run the command on a node that is one of four: the second has another package, the third a slow link
    and the fourth a slow disk.
    """
    rank, to_and_fro = int(os.environ["RANK"]), links._to_and_fro
    os.environ["SLURMD_NODENAME"] = f"node{rank}"
    preflight.measure_folder = lambda place: Folder(10**11, 1e9 if rank != 3 else 1e7, 1e9)
    if rank == 1:
        versions = preflight.versions()
        preflight.versions = lambda: versions | {"torch": "0.0.1"}
    # Each link takes 30 ms, beside which a busy machine delays it little. The third node sleeps as well:
    # the other end waits meanwhile, and this end counts its own sleep too.
    sleep = 0.2 if rank == 2 else 0.0
    links._to_and_fro = lambda *args: (time.sleep(sleep), to_and_fro(*args) + sleep / 2 + 0.03)[1]
    os.chdir(folder)
    with open(Path(folder, f"said{rank}"), "w") as file, redirect_stdout(file):
        code = run(["doctor", "--nodes", "--exclude-faulty", "--json", folder])
    leave(code)


def test_the_command_names_the_slow_and_the_different_node(tmp_path):
    assert run_fresh(odd_node, 4, str(tmp_path), process_group=False) == [3, 0, 0, 0]
    assert [(tmp_path / f"said{rank}").read_text() for rank in (1, 2, 3)] == [""] * 3
    said = json.loads((tmp_path / "said0").read_text())
    assert [node["name"] for node in said["nodes"]] == ["node0", "node1", "node2", "node3"]
    assert len(said["links"]) == 6 and all(link["rate"] > 0 and not link["error"] for link in said["links"])
    assert all(link["rate"] < 2**20 / 0.1 for link in said["links"] if 2 in (link["first"], link["second"]))
    assert sorted(said["exclude"]) == ["node1", "node2", "node3"]
    assert sorted((tmp_path / EXCLUDED_NODES).read_text().split()) == ["node1", "node2", "node3"]
    assert {one["check"] for one in said["findings"] if one["level"] == "fault"} >= {
        *("torch on node1", "node2", f"{tmp_path} on node3")
    }


def test_one_interruption_makes_no_link_slow(monkeypatch):
    taken = iter([1e-3, 2e-3, 5.0, 1e-3])  # the first says how long the messages may be
    monkeypatch.setattr(links, "_to_and_fro", lambda *args: next(taken))
    monkeypatch.setattr(links, "_send", lambda group, size, to: sent.append(int(size)))
    sent = []
    rate = links._rate(None, 0)
    assert sent == [pytest.approx(0.1 / 3 * 2**20 / 1e-3, abs=1)] and rate == sent[0] / 1e-3


def one_of_three(folder):
    """Compare nodes of which the second never comes, and two ranks are on the first."""
    rank = int(os.environ["RANK"])
    os.environ["SLURMD_NODENAME"] = "first" if rank in (0, 2) else f"node{rank}"
    preflight.measure_folder = lambda place: Folder(10**11, 1e9, 1e9)
    found = None if rank == 1 else preflight.preflight([Path(folder)], come=timedelta(seconds=1.5))
    assert (found is None) == (rank != 0)
    if found is not None:
        (told, *_) = found.findings
        assert told.level == "fault" and told.found == "2 nodes: first, node3; ranks 1 did not come"
        assert [(link.first, link.second) for link in found.links] == [(0, 1)]
    leave(0)


def test_a_rank_that_does_not_come_is_named_and_the_others_are_compared(tmp_path):
    assert run_fresh(one_of_three, 4, str(tmp_path), process_group=False) == [0] * 4


def test_without_a_launcher_the_command_says_how_to_start_it(capsys):
    assert run(["doctor", "--nodes"]) == 2
    assert "srun --ntasks-per-node=1 trilith doctor --nodes" in capsys.readouterr().err
    assert run(["doctor", "--exclude-faulty"]) == 2
