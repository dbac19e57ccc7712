"""What a job keeps beside its output: a journal of which whole lines count, and a lock of one process."""

import os
from dataclasses import dataclass
from unittest import mock

import pytest
from support.damage import flip_bit
from trilith.storage.disk import Disk, FileLock
from trilith.storage.small_files import Journal


@dataclass(frozen=True)
class Mark:
    portions: int
    name: str = ""


MARKS = [Mark(1), Mark(2, "ü\n"), Mark(3, "x" * 500)]


@pytest.fixture
def path(tmp_path):
    journal = Journal(tmp_path / "journal", Mark)
    for mark in MARKS:
        journal.add(mark)
    return tmp_path / "journal"


def test_cut_anywhere_its_whole_lines_are_read_and_it_goes_on_behind_them(path):
    whole = path.read_bytes()
    ends = [number + 1 for number, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == 3
    for length in [*range(ends[1] + 10), *range(len(whole) - 12, len(whole) + 1)]:
        path.write_bytes(whole[:length])
        journal = Journal(path, Mark)
        assert journal.records == MARKS[: sum(end <= length for end in ends)], length
        journal.add(Mark(9))
        assert Journal(path, Mark).records == journal.records


@pytest.mark.parametrize("bit", range(0, 240, 7))
def test_behind_a_flipped_bit_nothing_is_believed(path, bit):
    flip_bit(path, *divmod(bit, 8))
    assert Journal(path, Mark).records == []


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b'{"portions": 4, "name": ""}\n', b"\x00", b"\xff \xff\n"])
def test_nonsense_is_no_record(path, line):
    with path.open("ab") as journal:
        journal.write(line)
    assert Journal(path, Mark).records == MARKS
    assert Journal(path, list[int]).records == []  # nor are records of another kind


def test_it_forgets_what_is_not_so(path):
    journal = Journal(path, Mark)
    journal.clear()
    assert journal.records == [] and Journal(path, Mark).records == []
    journal.add(Mark(7))
    assert Journal(path, Mark).records == [Mark(7)]


def test_a_record_is_on_the_disk_when_it_was_added(tmp_path):
    disk = mock.Mock()
    with mock.patch.multiple(Disk, write=disk.write, sync=disk.sync):
        Journal(tmp_path / "journal", Mark).add(Mark(1))
    assert [name for name, *_ in disk.mock_calls] == ["write", "sync"]


def holds(path):
    lock = FileLock.take(path)
    assert lock is not None
    return lock


def test_one_has_it_until_it_is_released(tmp_path):
    lock = holds(tmp_path / "lock")
    assert FileLock.take(tmp_path / "lock") is None
    lock.release()
    lock.release()  # closes no descriptor of somebody else's
    assert (tmp_path / "lock").exists()
    holds(tmp_path / "lock").remove()
    assert not (tmp_path / "lock").exists()


def test_a_lock_whose_file_was_removed_meanwhile_guards_nothing(tmp_path, monkeypatch):
    """Between the opening of the file and its lock another process ends, and removes the file."""
    path, before = tmp_path / "lock", os.open

    def late(name, flags, mode):
        fd = before(name, flags, mode)
        monkeypatch.setattr(os, "open", before)
        path.unlink()
        return fd

    monkeypatch.setattr(os, "open", late)
    lock = holds(path)
    assert os.path.samestat(os.stat(path), os.fstat(lock.fd)) and FileLock.take(path) is None


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        FileLock.take(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()
