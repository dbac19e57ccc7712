"""What a run says while it goes: a line every few steps, and every step in metrics.jsonl."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from trilith.training import metrics
from trilith.training.metrics import MetricsLog, StepMetrics, Terminal, read_metrics


def step(number: int) -> StepMetrics:
    return StepMetrics(number, 2.5, 0.75, 3e-4, 4096, 12_345.6, 0.33)


def test_the_line_has_loss_norm_rate_speed_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    terminal = Terminal(steps=100, every=10)
    for number in range(100):
        terminal.step(step(number))
        now[0] += 2.0
    lines = capsys.readouterr().out.splitlines()
    assert [int(re.findall(r"step +(\d+)/100", line)[0]) for line in lines] == [*range(1, 100, 10), 100]
    assert lines[1].split() == (
        [
            "step",
            "11/100",
            "loss",
            "2.5000",
            "grad",
            "norm",
            "0.750",
            "lr",
            "3.00e-04",
            "12,346",
            "tokens/s",
            "02:58",
            "left",
        ]
    )
    assert lines[0].endswith("--:-- left") and lines[-1].endswith("00:00 left")


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(steps=3, every=1, quiet=True).step(step(0))
    assert capsys.readouterr().out == ""


def test_a_resumed_log_drops_what_is_done_again_and_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path, start=0)
    for number in range(5):
        log.write(step(number))
    log.close()
    path.write_text(path.read_text() + '{"step": 5, "lo')
    again = MetricsLog(path, start=3)
    again.write(step(3))
    again.close()
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 3]
