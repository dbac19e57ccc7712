"""`trilith schedule`: a timetable that is printed, drawn and measured."""

import re

import pytest
from trilith.cli.app import run
from trilith.pipeline import SCHEDULE_NAMES, schedule_kind


def test_it_prints_and_draws(tmp_path, capsys):
    picture = tmp_path / "zbv.png"
    assert run(f"schedule --name zbv --stages 2 --microbatches 4 --out {picture}".split()) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    # The last: 1 / (3 * 2 * 4 + 1).
    for line in ("rank 0 +0 3 ", "rank 1 +1 2 ", r"all +4\.0%; by the formula 4\.0%$"):
        assert re.search(f"^{line}", printed, re.MULTILINE), line


def test_a_measured_run_waits_at_least_as_long_as_the_formula_says(capsys):
    words = ["--name", "1f1b", "--stages", "2", "--microbatches", "4", "--measure", "--unit", "0.05"]
    assert run(["schedule", *words]) == 0
    (computed, measured, formula) = re.findall(r"([\d.]+)%", capsys.readouterr().out.splitlines()[-1])
    assert computed == formula == "20.0"
    assert 19.5 < float(measured) < 90


@pytest.mark.parametrize("command", ["schedule", "parity"])
def test_the_help_names_every_schedule_and_how_many_stages_each_has(command, capsys):
    run([command, "--help"])
    printed = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert ", ".join(SCHEDULE_NAMES) in printed
    plain = [name for name in SCHEDULE_NAMES if schedule_kind(name).virtual_stages == 1]
    assert f"default: 2, or 1 with {', '.join(plain)}" in printed
    assert {schedule_kind(name).virtual_stages for name in SCHEDULE_NAMES} == {1, 2}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--name", "zigzag"], "one of gpipe, 1f1b"),
        (["--name", "1f1b", "--microbatches", "3"], "at least 4 with 1f1b over pipeline=4, found 3"),
        (["--name", "1f1b", "--virtual", "2"], "1 with 1f1b, found 2"),
        (["--name", "1f1b", "--out", "picture.xyz"], "ends in .png, .svg, .pdf, found picture.xyz"),
        (["--name", "1f1b", "--out", "nowhere/picture.png"], "a folder that exists"),
    ],
)
def test_what_cannot_be_shown_is_refused_first(words, says, capsys):
    assert run(["schedule", *words]) == 2
    told = capsys.readouterr()
    assert says in told.err and told.err.count("\n") == 1 and not told.out
