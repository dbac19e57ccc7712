"""While a command imports what it needs, the system fetches what it will read: where its readers begin."""

import os
from pathlib import Path

from trilith.system import read_ahead as module


def advised(folder, readers, monkeypatch, memory=1000):
    """Return the advice for a folder: the file's name, and the step in it."""
    asked, opened, plain = [], [], Path.open

    def noted(path, *how, **more):
        assert all(file.closed for _, file in opened), "one file at a time"
        opened.append((path.name, plain(path, *how, **more)))
        return opened[-1][1]

    with monkeypatch.context() as watched:
        watched.setattr(module, "memory_available", lambda: memory)
        watched.setattr(module, "_STEP", 10)
        watched.setattr(Path, "open", noted)
        watched.setattr(
            os,
            "posix_fadvise",
            lambda _, at, size, __: asked.append((opened[-1][0], at // size)),
        )
        module._advise(folder, readers)
    assert all(file.closed for _, file in opened)
    return asked


def test_each_reader_finds_what_it_begins_with(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(bytes(35))
    (tmp_path / "b.safetensors").write_bytes(bytes(20))
    (tmp_path / "c.bin").write_bytes(bytes(20))
    a, b = [("a.safetensors", step) for step in range(4)], [("b.safetensors", step) for step in range(2)]
    assert advised(tmp_path, 1, monkeypatch) == a + b
    assert advised(tmp_path, 2, monkeypatch) == [a[0], a[3], a[1], b[0], a[2], b[1]]
    assert advised(tmp_path, 2, monkeypatch, memory=160) == [a[0], a[3], a[1], b[0]]  # a quarter of it
    assert advised(tmp_path, 1, monkeypatch, memory=None) == []
    os.mkfifo(tmp_path / "0.safetensors")  # which nobody writes to
    assert advised(tmp_path, 1, monkeypatch) == a + b
    assert advised(tmp_path / "nothere", 1, monkeypatch) == advised(tmp_path / "c.bin", 2, monkeypatch) == []
    assert advised(tmp_path / "\0", 1, monkeypatch) == []
    (tmp_path / "d.safetensors").symlink_to("nothere")
    assert advised(tmp_path, 1, monkeypatch) == []
