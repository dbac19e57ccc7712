"""What a run reports: lines, every step in metrics.jsonl, and a page that needs nothing else."""

import errno
import json
import os
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.short_runs import run_recipe, tiny_recipe
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens
from trilith.runs import terminal as terminal_module
from trilith.runs.metrics import StepLog, StepMetrics, read_metrics
from trilith.runs.report.chart import COLOURS, Chart, Series
from trilith.runs.report.page import make_report
from trilith.runs.report.record import RunRecord, read_run, with_vanished
from trilith.runs.terminal import Terminal
from trilith.storage.disk import DiskFailed
from trilith.testing import run_parallel

EMPTY_TAGS = {"meta", "link"}
#: What matplotlib gives a style of its own.
DRAWN = {"path", "g", "text", "use", "rect"}


class Page(HTMLParser):
    """Parse a page: elements with their attributes, cells by row, all text; tags must close in order."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.rows = []
        self.text, self._open = "", list[str]()
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY_TAGS:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if "style" not in self._open:
            self.text += data

    def row(self, first):
        (found,) = (row[1:] for row in self.rows if row and row[0] == first)
        return found

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def assert_stands_alone(text):
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]|url\((?!#)|@import", text), "it asks for something outside"
    for tag, attributes in page.elements:
        assert tag not in ("script", "img", "iframe", "object", "embed", "video", "audio", "form", "a")
        for key, value in attributes.items():
            assert key not in ("src", "srcset") and not key.startswith("on")
            assert key != "style" or tag in DRAWN
            assert key != "href" or value == "data:,"
            assert key != "xlink:href" or value.startswith("#")
    policy = next(one for one in page.all("meta") if one.get("http-equiv") == "Content-Security-Policy")
    assert str(policy["content"]).startswith("default-src 'none'")
    return page


def steps(count, **changes):
    return [
        {"step": n, "loss": 3.0 - n / count, "grad_norm": 0.5, "lr": 1e-3, "tokens": 64, "seconds": 0.25}
        | {"tokens_per_second": 256.0, "memory": 2**30}
        | changes
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Stopped after 3 steps at tensor 2 and resumed on one rank, with evaluation, as the CLI reports it."""
    place = tmp_path_factory.mktemp("report")
    raw = tiny_recipe(place / "run", write_tokens(place / "tokens"), watch={"peak_flops": 1e12})
    raw["evaluation"] = {"tokens": str(place / "tokens"), "every": 2, "samples": 4}
    run_parallel(run_recipe, 2, raw | {"layout": {"tensor": 2}, "stop_after": 3})
    run_parallel(run_recipe, 1, raw)
    assert run(["report", str(place / "run")]) == 0
    return place / "run"


def test_the_report_of_a_resumed_run_has_every_number(resumed):
    page = assert_stands_alone((resumed / "report.html").read_text())
    lines = read_metrics(resumed / "metrics.jsonl")
    assert len(lines) == 6
    (head,) = (row for row in page.rows if row[:2] == ["step", "loss"])
    for line in lines:
        row = dict(zip(head[1:], page.row(str(line["step"] + 1)), strict=True))
        for key, value in line.items():
            if key not in ("step", "tokens", "skipped", "skips"):
                name, wanted = key.replace("_", " "), float(f"{value:.5e}")  # six digits
                if key == "memory":
                    name, wanted = "memory (GiB)", f"{value / 2**30:.2f}"
                elif key.startswith("mfu"):
                    wanted = f"{value:.1%}"
                cell = row[name] if isinstance(wanted, str) else float(row[name].replace(",", ""))
                assert cell == wanted and len(row[name]) < 13, key
    assert page.row("state") == ["finished all 6 steps"]
    assert page.row("layout") == ["tensor 2; then one rank"]
    assert page.row("resumed") == ["once"]
    assert page.row("tokens") == [f"{6 * 4 * 16:,}"]
    assert page.row("last complete checkpoint") == [str(resumed / "checkpoints" / "step-00000006")]
    what = [row[1:] for row in page.rows if row and re.match(r"\d{4}-", row[0])]
    assert [row[:2] for row in what] == [
        *(["started", "0"], ["saved", "3"], ["finished", "3"]),
        *(["resumed", "3"], ["saved", "6"], ["finished", "6"]),
    ]
    assert what[3][2] == "on one rank, from step-00000003, written by tensor 2"
    assert page.row("optimizer.lr") == ["0.01"]


def test_every_chart_has_a_name_and_says_in_words_what_it_shows(resumed):
    text = (resumed / "report.html").read_text()
    page = Page(text)
    charts = [one for one in page.all("svg") if one.get("role") == "img"]
    assert len(charts) == 6
    ids = [str(one["id"]) for _, one in page.elements if one.get("id")]
    assert len(ids) == len(set(ids))
    assert all(one.get("role") == "img" or one.get("aria-hidden") == "true" for one in page.all("svg"))
    first, last = (f"{line['loss']:.4g}" for line in read_metrics(resumed / "metrics.jsonl")[::5])
    assert f"Loss by step. training: from {first} at step 1 to {last} at step 6" in charts[0]["aria-label"]
    assert page.all("html") == [{"lang": "en"}] and "<title>Training run: " in text
    assert {one.get("scope") for one in page.all("th")} == {"row", "col"}


def test_what_a_run_s_files_say_stays_text():
    bad = '<script>alert("1")</script>&amp;\'>'
    events = [
        {"event": "started", "step": 0, "time": 0.0, "layout": bad, "world": 1, "weights": bad}
        | {"recipe": {"out": bad, bad: 1}},
        {"event": "failed", "step": 3, "time": 1.0, "why": bad},
    ]
    record = RunRecord(bad, steps(3, loss=None, lr=bad), events, bad)
    for text in (make_report([record]), make_report([record, record])):
        page = assert_stands_alone(text)
        assert page.text.count(bad) >= 6
        assert "failed after step 3" in page.text


def test_runs_that_are_compared_share_charts_and_show_where_they_differ():
    def record(name, lr):
        recipe = {"steps": 4, "optimizer": {"lr": lr, "clip": 1.0}}
        events = [{"event": "started", "step": 0, "time": 0.0, "layout": "one", "world": 1, "recipe": recipe}]
        return RunRecord(name, steps(4), events, None)

    page = assert_stands_alone(make_report([record("a", 0.1), record("b", 0.2)]))
    assert page.row("run") == page.row("key") == ["a", "b"]
    assert ["optimizer.lr", "0.1", "0.2"] in page.rows
    assert sum(bool(row) and row[0] == "optimizer.clip" for row in page.rows) == 2  # in the recipes alone
    patterns = {one["stroke-dasharray"] for one in page.all("line")}
    assert len(patterns) == 2, "without colour the runs cannot be told apart"
    drawn = {style for one in page.all("path") for style in re.findall(r"dasharray: [\d.,]+", one["style"])}
    assert len(drawn) >= 2
    assert page.row("state")[0].startswith("still running, or killed without a word")


def test_an_attempt_that_ended_without_a_word_is_listed():
    events = [
        {"event": event, "step": step, "time": 0.0}
        for event, step in (("started", 0), ("saved", 4), ("resumed", 4), ("stopped", 6), ("resumed", 6))
    ]
    for reached, step in (({}, 4), ({"reached": 7}, 7)):
        events[2] |= reached
        assert [(one["event"], one["step"]) for one in with_vanished(events)] == [
            *(
                ("started", 0),
                ("saved", 4),
                ("vanished", step),
                ("resumed", 4),
                ("stopped", 6),
                ("resumed", 6),
            )
        ]


def test_skipped_steps_are_listed():
    lines = steps(4)
    lines[2] |= {"skipped": "overflow", "loss": None}
    page = Page(make_report([RunRecord("r", lines, [], None)]))
    assert page.row("skipped steps") == ["1: 3 (overflow)"]
    assert page.row("3")[0] == "not finite"


def test_a_long_run_keeps_its_peaks_and_stays_small():
    lines = steps(100_000)
    lines[54_321]["loss"] = 9.0
    text = make_report([RunRecord("long", lines, [], None)])
    assert len(text) < 1_000_000
    (losses,) = lines_of(text.partition("</figure>")[0])
    bottom, top = max(y for _, y in losses), min(y for _, y in losses)
    assert len(losses) < 1300 and bottom - top == pytest.approx(7 * (bottom - losses[0][1]), rel=0.02)
    assert "one step in 100; all of them are in metrics.jsonl" in text


def lines_of(chart):
    """Return the points of each curve of a chart, piece by piece."""
    curves = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke-dasharray', chart)
    pieces = [re.findall(r"[-\d.]+ [-\d.]+", piece) for curve in curves for piece in curve.split("M")[1:]]
    return [[tuple(map(float, point.split())) for point in piece] for piece in pieces]


def test_a_curve_stands_where_its_numbers_are_and_a_point_alone_has_a_mark():
    points = [(0, 0.0), (5, 1.0), (10, None), (15, 4.0), (20, 4.0), (25, None), (30, 2.0)]
    chart = Chart("c", "T", "", [Series("s", points, 1)]).svg()
    (a, b), (c, d) = [line for line in lines_of(chart) if len(line) > 1]
    assert a[0] < b[0] < c[0] < d[0] and a[1] > b[1] > c[1] == d[1]
    assert (b[1] - a[1]) * 4 == pytest.approx(c[1] - a[1], abs=0.5)
    assert (b[0] - a[0]) * 4 == pytest.approx(d[0] - a[0], abs=0.5)
    assert len(re.findall(rf"<use [^>]*fill: {COLOURS[1]}", chart)) == 1
    assert chart == Chart("c", "T", "", [Series("s", points, 1)]).svg()
    assert Chart("c", "T", "", [Series("s", [(1, None)], 0)]).svg() == ""
    wide = Chart("c", "T", "", [Series("s", [(1, 1e-3), (2, 1e3)], 0)]).svg()
    assert ">by step, logarithmic<" in wide


def test_a_line_that_a_kill_cut_short_or_that_no_run_wrote_does_not_hide_the_rest(tmp_path):
    lines = [*steps(2, mfu_causal=0.4), *steps(1, memory="much"), *steps(1, evaluation_loss=[])]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"st')
    (tmp_path / "events.jsonl").write_text(json.dumps(STARTED) + '\n{"ev\n')
    record = read_run(tmp_path)
    assert (len(record.steps), len(record.events)) == (2, 1)
    assert Page(make_report([record])).row("median MFU") == ["peak not known"]


STARTED = {"event": "started", "step": 0, "time": 0, "world": 1, "layout": "1 rank"}


@pytest.mark.parametrize(
    "odd",
    [
        *({"time": time} for time in (1e300, -1e18, True, "now", None)),
        *({"step": step} for step in (-1, 1.5, True)),
        *({"world": world} for world in ("two", None)),
        *({"event": event} for event in (7, "resumed", "saved")),
        {"event": "finished", "goal": "all"},
        {"recipe": [1]},
    ],
    ids=str,
)
def test_an_event_that_no_run_can_have_written_is_passed_over(tmp_path, odd):
    lines = [STARTED, STARTED | odd, 5, [1], "x"]
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = read_run(tmp_path)
    assert (record.steps, record.events) == ([], [STARTED])
    assert "on 1 rank" in make_report([record])


def step(number):
    return StepMetrics(
        number, 2.5, 0.75, 3e-4, 4096, 12_345.6, 0.33, mfu_causal=0.412, mfu_full=0.4567, memory=3 * 2**29
    )


def test_the_line_has_loss_norm_rate_speed_and_time_left(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal_module.time, "monotonic", lambda: now[0])
    terminal = Terminal(steps=100, interval=10)
    for number in range(100):
        terminal.step(step(number))
        now[0] += 2.0
    lines = capsys.readouterr().out.splitlines()
    assert [int(re.findall(r"step +(\d+)/100", line)[0]) for line in lines] == [1, *range(10, 101, 10)]
    assert lines[1] == (
        "step  10/100  loss 2.5000  grad norm 0.750  lr 3.00e-04  12,346 tokens/s  MFU 41.2% (full 45.7%)  "
        "1.50 GiB  0:03:00 left"
    )
    assert lines[0].endswith("-:--:-- left") and lines[-1].endswith(" 0:00:00 left")
    Terminal(steps=3, interval=1, quiet=True).step(step(0))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("steps", "stop"), [(100, 7), (7, 9)])
def test_a_skipped_step_and_the_last_of_a_run_that_stops_early_have_a_line(capsys, steps, stop):
    terminal = Terminal(steps=steps, interval=10, stop=stop)
    for number in range(7):
        terminal.step(replace(step(number), skipped="spike" if number == 3 else None))
    lines = capsys.readouterr().out.splitlines()
    assert [int(re.findall(rf"step +(\d+)/{steps}", line)[0]) for line in lines] == [1, 4, 7]


def test_what_is_not_known_is_not_said(capsys, tmp_path):
    plain = StepMetrics(0, float("inf"), 0.75, 3e-4, 4096, 12_345.6, 0.33, skipped="overflow", skips=3)
    Terminal(steps=1, interval=1).step(plain)
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
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 3]
    path.parent.rename(tmp_path / "elsewhere")  # while the run goes on
    again.write(asdict(step(4)))
    again.close()
    assert [line["step"] for line in read_metrics(path)] == [4]


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
