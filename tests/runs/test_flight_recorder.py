"""After a failure in a collective, the run's folder says which rank waited for which, and in which call."""

import json
import os
import pickle
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from trilith.cli.app import run
from trilith.parallel_state import PeerFailed
from trilith.runs.flight_recorder import Call, keeping_nccl_record, read_records_of, who_waits
from trilith.runs.guard import watched
from trilith.runs.heartbeat import status_folder
from trilith.storage.torch_archive import read_records
from trilith.testing import run_fresh


def call(number, *, ended, name="all_reduce", ranks=(0, 1, 2)):
    return Call("tensor", ranks, number, name, "float [4]", ended)


WHERE = "(collective 2 of ranks [0, 1, 2], group tensor)"


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ({}, []),
        ({0: [call(1, ended=True)], 1: [call(1, ended=True)]}, []),
        (
            {0: [call(1, ended=True), call(2, ended=False)], 1: [call(1, ended=True)]},
            [
                f"rank 0 waits in all_reduce float [4] {WHERE} for rank 1, whose last call there was 1, "
                "all_reduce and rank 2, which left no record"
            ],
        ),
        (
            {rank: [call(2, ended=rank == 2), call(2, ended=True)] for rank in range(3)},
            [
                f"ranks 0, 1 wait in all_reduce float [4] {WHERE}: all ranks have called it, so the network "
                "failed"
            ],
        ),
        (
            {0: [call(2, ended=False)], 1: [call(2, ended=False, name="broadcast")]},
            [f"{WHERE[1:-1]} differs: rank 0 calls all_reduce float [4]; rank 1 calls broadcast float [4]"],
        ),
    ],
)
def test_the_records_say_who_waits_for_whom(records, says):
    assert who_waits(records) == says


def cut_links():
    """Shut every connection of this process down, as a cable that is pulled ends it for both ends."""
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as link:
            if link.family in (socket.AF_INET, socket.AF_INET6) and link.getpeername():
                link.shutdown(socket.SHUT_RDWR)


def failing(out, is_cut):
    """Fail in the third collective of a group: both ranks if their link is cut, or rank 0, which waits for
    rank 1; both pass a pickle by.
    """
    rank = int(os.environ["RANK"])
    folder = status_folder(Path(out))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5), group_desc="tensor")
    numbers = torch.ones(4, 8)
    with (
        mock.patch("trilith.runs.guard._WAIT", 0.1),  # rank 1 is not to blame
        pytest.raises(PeerFailed),
        watched(folder, rank, 2, run="a"),
    ):
        dist.all_reduce(numbers, group=group)
        dist.broadcast(numbers, 0, group=group)
        if is_cut:
            cut_links()
        elif rank == 1:
            while not (Path(out) / "dumped").exists():  # rank 0 has given up
                time.sleep(0.02)
            raise PeerFailed("late")
        dist.all_reduce(numbers, group=group)
    if rank == 0:
        made = torch._C._distributed_c10d  # what NCCL's watchdog writes, of gloo's collectives
        (Path(out) / "dumped").write_bytes(made._dump_fr_trace(True, True, False))
    os._exit(0)


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    out = tmp_path_factory.mktemp("flight")
    assert run_fresh(failing, 2, str(out), False, process_group=False) == [0, 0]
    return out


def test_the_command_says_which_rank_did_not_come_or_that_the_network_failed(failed, tmp_path, capsys):
    codes = run_fresh(failing, 2, str(tmp_path), True, process_group=False)
    assert codes == [0, 0], [code.output for code in codes]
    where = "in all_reduce Float [4, 8] (collective 3 of ranks [0, 1], group tensor)"
    for out, says in (
        (failed, f"rank 0 waits {where} for rank 1, which left no record"),
        (tmp_path, f"ranks 0, 1 wait {where}: all ranks have called it, so the network failed"),
    ):
        assert run(["status", str(out), "--why"]) == 0
        assert capsys.readouterr().out.splitlines()[1:] == [says]


def test_nccl_s_pickle_is_read_without_running_it(failed, tmp_path):
    """The pickle of the same collectives says the same as the JSON; one that names anything is passed by.

    gloo's pickle lacks the ranks of groups, which NCCL's has.
    """
    record = read_records((failed / "dumped").read_bytes(), "dumped", {})
    assert record["entries"][-1]["frames"]
    record["pg_config"] = {name: {"ranks": "[0, 1]"} for name in ("0", "1")}
    (tmp_path / "nccl-rank0").write_bytes(pickle.dumps(record, protocol=2))
    assert read_records_of(tmp_path) == read_records_of(status_folder(failed))
    evil = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."
    (tmp_path / "nccl-rank1").write_bytes(evil)
    (tmp_path / "nccl-rank0").unlink()
    (tmp_path / "nccl-rank2").write_bytes((failed / "dumped").read_bytes()[:-5])
    (tmp_path / "collectives-rank3.json").write_text(json.dumps({"gloo": {"pg_config": []}}))
    assert not any(read_records_of(tmp_path).values())


def test_nccl_writes_into_the_run_s_folder_unless_told_otherwise(tmp_path, monkeypatch):
    place = "TORCH_FR_DUMP_TEMP_FILE"
    monkeypatch.delenv(place, raising=False)
    with keeping_nccl_record(tmp_path):
        assert os.environ[place] == str(tmp_path / "nccl-rank")
    assert place not in os.environ
    monkeypatch.setenv(place, "mine")
    with keeping_nccl_record(tmp_path):
        assert os.environ[place] == "mine"
    assert os.environ[place] == "mine"
