"""``trilith plan explain``: every line, computed again from its text, gives what the function gives."""

import json
from math import ceil, log2

import pytest
from trilith.cli.app import run
from trilith.cli.plan_explain import TOPICS
from trilith.planner.explanations.explanation import readable


def explained(capsys, *words):
    assert run(["plan", "explain", *words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


CASES = [
    *((topic,) for topic in TOPICS),
    *(("bubble", "--schedule", name) for name in ("interleaved", "interleaved-zero-bubble", "dualpipev")),
    ("bubble", "--schedule", "interleaved", "--virtual", "7", "--stages", "16", "--target", "0.05"),
    ("allreduce", "--ranks", "1"),
    ("allreduce", "--ranks", "1000", "--latency", "5e-6", "--bandwidth", "12.5e9"),
    *(("memory", "--recompute", mode, "--tensor", "4", "--pipeline", "2", "--zero", "1", "--data", "8")
      for mode in ("none", "selective", "full")),
    *(("memory", "--recompute", mode, "--tensor", "4", "--sequence-parallel", "--zero", "3")
      for mode in ("none", "selective", "full")),
    ("memory", "--model", "llama-3.1-8b"),
    ("mfu", "--model", "mixtral-8x7b", "--sequence", "4096"),
    ("training-time", "--model", "mixtral-8x7b", "--tokens", "2T"),
    ("experts", "--expert", "1"),
]  # fmt: skip


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_each_line_computed_from_its_text_gives_the_value(words, capsys):
    found = explained(capsys, *words)
    assert found["steps"] and found["sources"]
    known = {"ceil": ceil, "log2": log2, "max": max}
    known |= {one["symbol"]: one["value"] for one in found["given"]}
    for step in found["steps"]:
        for text in (step["numbers"], step["formula"]):
            assert eval(text, {}, known) == pytest.approx(step["value"], rel=1e-7), step
        known[step["symbol"]] = step["value"]
    assert run(["plan", "explain", *words]) == 0
    shown = capsys.readouterr().out
    for step in found["steps"]:
        assert f"{step['symbol']} = {step['formula']}\n  = {step['numbers']}\n" in shown


@pytest.mark.parametrize("topic", TOPICS)
def test_each_number_that_is_given_has_an_option_that_changes_it(topic, capsys):
    for one in explained(capsys, topic)["given"]:
        other = "0.25" if one["value"] < 1 else "2" if one["option"] == "--virtual" else "8"
        words = (topic, one["option"], other)
        if one["option"] == "--virtual":
            words += ("--schedule", "interleaved")
        given = {given["symbol"]: given["value"] for given in explained(capsys, *words)["given"]}
        assert given[one["symbol"]] == float(other), words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bubble", "--virtual", "3"), "virtual"),
        (("bubble", "--schedule", "2f2b"), "schedule"),
        (("bubble", "--stages", "0"), "--stages"),
        (("allreduce", "--parameters", "many"), "--parameters"),
        (("allreduce", "--bandwidth", "0"), "--bandwidth"),
        (("zero", "--parameters", "1e40"), "--parameters"),
        (("memory", "--recompute", "some"), "--recompute"),
        (("memory", "--model", "llama-9"), "--model"),
        (("memory", "--model", "llama-3.1-8b", "--layers", "32"), "--layers"),
        (("mfu", "--model", "llama-3.1-8b", "--width", "64"), "--width"),
        (("training-time", "--model", "llama-3.1-8b", "--parameters", "8B"), "--parameters"),
        (("juggling",), "juggling"),
        ((), "Missing command"),
    ],
)
def test_bad_numbers_are_refused_in_one_line(words, said, capsys):
    assert run(["plan", "explain", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1 and said in err


def test_results_are_written_as_one_says_them():
    said = [readable(1.4e11, "bytes"), readable(0.15789, "share"), readable(6.3e24, "FLOPs")]
    said += [
        readable(0.00134, "s"),
        readable(2.5e-6, "s"),
        readable(27, "micro-batches"),
        readable(22.3, "s"),
        readable(4096 / 3, "outputs"),
    ]
    assert said == ["140 GB", "15.8 %", "6.3e+24 FLOPs", "1.34 ms", "2.5 us", "27 micro-batches", "22.3 s",
                    "1,365.3 outputs"]  # fmt: skip
