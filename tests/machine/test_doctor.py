"""The doctor: what it reports on this machine, and that it sees what would go wrong."""

import json
from pathlib import Path

import pytest
import torch
from trilith.cli.app import run
from trilith.machine import Finding
from trilith.machine.doctor import checks, devices, disk, host

TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\t0-31\t0
GPU1\tNV18\t X \tPIX\t0-31\t0
NIC0\tSYS\tPIX\t X
"""


def test_the_doctor_reports_on_this_machine_and_ends_with_0(tmp_path, capsys):
    assert run(["doctor", "--json", str(tmp_path)]) == 0
    found = [Finding(**one) for one in json.loads(capsys.readouterr().out)["findings"]]
    by_check = {one.check: one for one in found}
    assert {one.group for one in found} == {group for group, _ in checks.GROUPS}
    assert by_check["torch"].found == torch.__version__ and by_check["C++ compiler"].level == "ok"
    assert by_check["all-reduce, gloo"].level == "ok" and "2 ranks" in by_check["all-reduce, gloo"].found
    assert "locks work" in by_check["working directory"].found and str(tmp_path) in by_check
    assert all(one.todo for one in found if one.level != "ok")
    assert "the check itself" not in by_check and not [*tmp_path.iterdir()]


def test_a_fault_ends_with_3_and_each_line_says_what_to_do(monkeypatch, capsys):
    def broken(folders):
        return [
            Finding("files", "disk", "fault", "full", "make room"),
            Finding("files", "clock", "ok", "right"),
        ]

    monkeypatch.setattr(checks, "GROUPS", (("files", broken),))
    assert run(["doctor"]) == 3
    said = capsys.readouterr().out
    assert "make room" in said and "1 ok, 0 warning, 1 fault" in said


def test_a_check_that_raises_is_a_finding_and_the_others_still_run(monkeypatch):
    def wrong(folders):
        raise KeyError("x")

    def refused(folders):
        raise OSError(28, "No space left on device")

    good = [Finding("c", "good", "ok", "yes")]
    monkeypatch.setattr(checks, "GROUPS", (("a", wrong), ("b", refused), ("c", lambda folders: good)))
    first, second, third = checks.diagnose()
    assert first.level == "warning" and "KeyError" in first.found and "test_doctor.py" in first.found
    assert second.level == "fault" and "room" in second.todo.lower()
    assert third == good[0]


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({}, "ok", "locks work"),
        ({"try_lock": lambda fd: False}, "fault", "locks do not work"),
        ({"_LEAST_ROOM": float("inf")}, "warning", "free"),
        ({"_SECONDS_APART": -1.0}, "warning", "clock"),
    ],
)
def test_a_file_system_is_judged_by_locks_room_and_clock(change, level, says, tmp_path, monkeypatch):
    for name, value in change.items():
        monkeypatch.setattr(disk, name, value)
    found = disk._place("here", tmp_path)
    assert found.level == level and says in found.found and str(tmp_path) in found.found


def test_a_folder_that_cannot_be_written_to_is_a_fault_and_one_is_checked_once(tmp_path, monkeypatch):
    assert disk._place("here", Path("/proc")).level == "fault"
    monkeypatch.chdir(tmp_path)
    found = {one.check: one for one in disk.check_files([tmp_path])}
    assert "the same folder as working directory" in found[str(tmp_path)].found


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("NCCL_P2P_DISABLE", "1", "warning"),
        ("NCCL_DEBUG", "INFO", "ok"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warning"),
        ("OMP_NUM_THREADS", "100000", "warning"),
    ],
)
def test_variables_that_do_harm_are_warned_of(name, value, level, monkeypatch):
    monkeypatch.setenv(name, value)
    found = {finding.check: finding for finding in host.check_variables()}[name]
    assert (found.level, found.found) == (level, value)


def test_low_limits_are_warned_of(monkeypatch):
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(host, "memory_available", lambda: 10**9)
    found = {finding.check: finding.level for finding in host.check_limits()}
    assert found["memory"] == found["limit on open files"] == found["limit on processes"] == "warning"


def test_a_compiler_that_is_missing_or_fails_is_warned_of(tmp_path, monkeypatch):
    def compiler():
        return {finding.check: finding for finding in host.check_software()}["C++ compiler"]

    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiler().level == "warning"
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho bad flag >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    assert "bad flag" in compiler().found


def test_a_driver_beside_a_cpu_build_of_torch_is_a_fault(monkeypatch):
    monkeypatch.setattr(host.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert {finding.check: finding for finding in host.check_software()}["torch's build"].level == "fault"


def test_a_gpu_is_judged_by_its_memory_its_errors_and_its_name(monkeypatch):
    gpu = {
        "get_device_name": lambda number: "NVIDIA H100 80GB HBM3",
        "mem_get_info": lambda number: (84 * 10**9, 85 * 10**9),
        "get_device_capability": lambda number: (9, 0),
    }
    for name, value in gpu.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(devices, "smi", lambda *options: "0, Not Active")
    (good,) = devices._gpu(0)
    assert good.level == "ok" and "84.0 of 85.0 GB free" in good.found
    monkeypatch.setattr(devices, "smi", lambda *options: "2, Active")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (40 * 10**9, 85 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Unheard-of 1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (7, 0))
    found = {one.check: one.level for one in devices._gpu(0)}
    assert found == {
        "GPU 0": "warning",
        "GPU 0: bf16": "warning",
        "GPU 0: peak": "warning",
        "GPU 0: memory": "fault",
        "GPU 0: clock": "warning",
    }


def test_links_are_read_from_the_table_and_slow_ones_are_warned_of(monkeypatch):
    assert devices.link_kinds(TOPOLOGY) == {"NV18"}
    assert devices.link_kinds("") == set()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    for text, level in ((TOPOLOGY, "ok"), (TOPOLOGY.replace("NV18", "SYS"), "warning")):
        monkeypatch.setattr(devices, "smi", lambda *options, text=text: text)
        assert [one.level for one in devices._links()] == [level]
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    (found,) = devices._links()
    assert found.level == "warning" and "no peer access" in found.found


def wrong_sum(device):
    raise RuntimeError("the sum of 2 ranks is wrong: 7")


def test_ranks_that_add_wrongly_are_a_fault(monkeypatch):
    monkeypatch.setattr(devices, "all_reduce", wrong_sum)
    found = devices._all_reduce("cpu", 2)
    assert found.level == "fault" and "the sum of 2 ranks is wrong: 7" in found.found and found.todo


def test_a_folder_that_does_not_exist_is_refused_also_as_the_working_directory(tmp_path, monkeypatch, capsys):
    assert run(["doctor", "nowhere"]) == 2
    assert capsys.readouterr().err == "error: nowhere: expected a folder, found no such folder\n"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(["doctor"]) == 2
    assert "working directory" in capsys.readouterr().err
