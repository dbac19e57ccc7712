"""A lock belongs to one process at a time, and a file that somebody wrote into is nobody's lock to remove."""

import os
import signal

import pytest
from trilith.storage.lock import FileLock


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


def test_it_is_free_when_its_holder_was_killed(tmp_path):
    child = os.fork()
    if child == 0:
        FileLock.take(tmp_path / "lock")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    holds(tmp_path / "lock").remove()


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


def test_a_file_with_something_in_it_stays(tmp_path):
    path = tmp_path / "lock"
    path.write_text("precious")
    holds(path).remove()
    assert path.read_text() == "precious"


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        FileLock.take(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()
