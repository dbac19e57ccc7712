"""Check what a run reports: a printed line every few steps, and every step in metrics.jsonl."""

import errno
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from trilith.runs import terminal as terminal_module
from trilith.runs.metrics import StepLog, StepMetrics, read_metrics
from trilith.runs.terminal import Terminal
from trilith.storage.disk import DiskFailed


def step(number):
    return StepMetrics(
        number, 2.5, 0.75, 3e-4, 4096, 12_345.6, 0.33, mfu_causal=0.412, mfu_full=0.4567, memory=3 * 2**29
    )


def test_the_line_has_loss_norm_rate_speed_and_time_left(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal_module.time, "monotonic", lambda: now[0])
    terminal = Terminal(steps=100, every=10)
    for number in range(100):
        terminal.step(step(number))
        now[0] += 2.0
    lines = capsys.readouterr().out.splitlines()
    assert [int(re.findall(r"step +(\d+)/100", line)[0]) for line in lines] == [1, *range(10, 101, 10)]
    assert lines[1] == (
        "step  10/100  loss 2.5000  grad norm 0.750  lr 3.00e-04  12,346 tokens/s  MFU 41.2% (full 45.7%)  "
        "1.50 GiB  03:00 left"
    )
    assert lines[0].endswith("--:-- left") and lines[-1].endswith("00:00 left")


def test_quiet_says_nothing(capsys):
    Terminal(steps=3, every=1, quiet=True).step(step(0))
    assert capsys.readouterr().out == ""


def test_what_is_not_known_is_not_said(capsys, tmp_path):
    plain = StepMetrics(0, float("inf"), 0.75, 3e-4, 4096, 12_345.6, 0.33, skipped="overflow", skips=3)
    Terminal(steps=1, every=1).step(plain)
    said = capsys.readouterr().out
    assert "MFU" not in said and "GiB" not in said and "skipped: overflow, 3 so far" in said
    log = StepLog(tmp_path / "metrics.jsonl", start=0)
    log.write(asdict(plain))
    log.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert "mfu_causal" not in line and line["loss"] is None and line["skipped"] == "overflow"


def test_a_resumed_log_drops_what_is_done_again_and_a_line_cut_short(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = StepLog(path, start=0)
    for number in range(5):
        log.write(asdict(step(number)))
    log.close()
    path.write_text(path.read_text() + '{"step": 5, "lo')
    again = StepLog(path, start=3)
    again.write(asdict(step(3)))
    again.close()
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "broken", [b'{"step": 1, "lo', b"\xff\xfe", b"[]", b'{"step": "1"}', b"NaN", b"\0" * 40]
)
def test_a_resume_keeps_the_good_lines_around_a_broken_one(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + broken + b'\n{"step": 2}\n{"step": 3}\n')
    StepLog(path, start=3).close()
    assert path.read_text() == '{"step": 0}\n{"step": 2}\n'
    aside = tmp_path / "metrics.jsonl.broken"
    assert aside.read_text() == broken.decode(errors="replace") + "\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.jsonl.broken"]
    for number in (2, 3):  # another kill, another resume
        path.write_text(path.read_text() + f"torn {number}")
        StepLog(path, start=3).close()
        assert (tmp_path / f"metrics.jsonl.broken-{number}").read_text() == f"torn {number}\n"
    assert aside.read_text() == broken.decode(errors="replace") + "\n"


def test_a_disk_that_is_full_at_a_resume_keeps_the_metrics(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')

    def full(self, text, **_):
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DiskFailed, match=r"metrics\.jsonl: cannot be written: No space left"):
        StepLog(path, start=1)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n' and [*tmp_path.iterdir()] == [path]
