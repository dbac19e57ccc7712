"""Check what the system reports about this process."""

import mmap
import os

import pytest
from trilith.system import process_info
from trilith.system.process_info import own_memory, start_of

MORE = 64 << 20


def test_memory_that_is_written_to_is_counted_as_our_own():
    before = own_memory()
    assert before is not None and 0 < before.anonymous <= before.resident <= before.virtual
    with mmap.mmap(-1, MORE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        promised = own_memory()
        held.write(b"x" * MORE)
        written = own_memory()
    assert promised is not None and written is not None
    assert promised.virtual - before.virtual >= MORE and promised.data - before.data >= MORE
    for grown in (written.resident - promised.resident, written.anonymous - promised.anonymous):
        assert grown > MORE // 2


def test_a_system_without_proc_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(process_info, "_PROC", tmp_path)
    assert own_memory() is None and start_of(os.getpid()) == 0 and not process_info.has_process_info()


@pytest.mark.parametrize("text", ["", "1 2 3", "a b c d e f g"])
def test_numbers_that_cannot_be_read_are_none(tmp_path, monkeypatch, text):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "statm").write_text(text)
    monkeypatch.setattr(process_info, "_PROC", tmp_path)
    assert own_memory() is None
