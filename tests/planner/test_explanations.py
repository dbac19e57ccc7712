"""``trilith plan explain``: the text of a formula gives what is shown, and what the planner computes."""

from itertools import count
from math import ceil, log2
from types import SimpleNamespace

import pytest
from support.topics import explained
from trilith.cli.app import run
from trilith.cli.plan_explain import read_table
from trilith.pipeline import bubble
from trilith.planner.communication import ring_wire_bytes
from trilith.planner.explanation import evaluate, readable

TOPICS = read_table()[1]


CASES = [
    *((topic,) for topic in TOPICS),
    *(("bubble", "--schedule", name) for name in ("interleaved", "interleaved-zero-bubble", "dualpipev")),
    ("bubble", "--schedule", "interleaved", "--virtual-stages", "7", "--pipeline", "16", "--target", "0.05"),
    ("allreduce", "--ranks", "1"),
    ("allreduce", "--ranks", "1000", "--latency", "5e-6", "--bandwidth", "12.5e9"),
    *(("memory", "--recompute", mode, "--tensor", "4", "--pipeline", "2", "--zero", "1", "--data", "8")
      for mode in ("none", "selective", "full")),
    *(("memory", "--recompute", mode, "--tensor", "4", "--sequence-parallel", "--zero", "3")
      for mode in ("none", "selective", "full")),
    ("memory", "--model", "llama-3.1-8b"),
    ("mfu", "--model", "mixtral-8x7b", "--sequence-length", "4096"),
    ("training-time", "--model", "mixtral-8x7b", "--tokens", "2T"),
    ("experts", "--expert", "1"),
]  # fmt: skip


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_each_line_computed_from_its_text_gives_the_value(words, capsys):
    found = explained(*words)
    assert found["steps"] and found["sources"]
    known = {"ceil": ceil, "log2": log2, "max": max}
    known |= {number["symbol"]: number["value"] for number in found["inputs"]}
    for step in found["steps"]:
        for text in (step["numbers"], step["formula"]):
            assert eval(text, {}, known) == pytest.approx(step["value"], rel=1e-7), step
        known[step["symbol"]] = step["value"]
    assert run(["plan", "explain", *words]) == 0
    shown = capsys.readouterr().out
    for step in found["steps"]:
        assert f"{step['symbol']} = {step['formula']}\n  = {step['numbers']}\n" in shown


def option(words, flag, default):
    return words[words.index(flag) + 1] if flag in words else default


def of_bubble(at, words):
    schedule = option(words, "--schedule", "1f1b")
    layout = SimpleNamespace(pipeline=at.p, virtual_stages=at.v)
    share = bubble(schedule, layout, at.m)
    values = {"bubble": share, "efficiency": 1 - share, "overhead": share / (1 - share)}
    if hasattr(at, "b"):
        values["needed"] = next(m for m in count(1) if bubble("1f1b", layout, m) <= at.b + 1e-15)
    return values


def of_pipeline(at, words):
    return of_bubble(at, words) | {"blocks": at.L / (at.p * at.v)}


def of_allreduce(at, words):
    size = at.P * at.w
    ring = {"B": size, "ring": ring_wire_bytes("all_reduce", size, at.N)}
    ring["scatter"] = ring_wire_bytes("reduce_scatter", size, at.N)
    return ring | ({"tree": 2 * size} if at.N > 1 else {})


PLANNED = [words for words in CASES if words[0] in ("bubble", "pipeline", "allreduce")]


@pytest.mark.parametrize("words", [*PLANNED, ("bubble", "--target", "0.2")], ids=" ".join)
def test_what_is_computed_from_the_text_is_what_the_planner_computes(words):
    """Other topics are compared with the plans of real models, and with numbers worked out by hand."""
    explanation = explained(*words)
    at = SimpleNamespace(**{number["symbol"]: number["value"] for number in explanation["inputs"]})
    expected = globals()[f"of_{words[0]}"](at, words)
    shown = {step["symbol"]: step["value"] for step in explanation["steps"] if step["symbol"] in expected}
    assert shown == pytest.approx(expected, rel=1e-12)


def test_a_formula_is_exact_and_holds_arithmetic_alone():
    assert ceil((4 - 1) * (1 - 0.2) / 0.2) == 13  # rounded, and one too many
    assert evaluate("ceil((p - 1) * (1 - 0.2) / 0.2)", {"p": 4}) == 12
    assert evaluate("2 ** 3 + log2(8) - max(1, 2)", {}) == 9
    for text in ("[1]", "a.b", "f'{1}'"):
        with pytest.raises(ValueError, match="no arithmetic"):
            evaluate(text, {})


@pytest.mark.parametrize("topic", TOPICS)
def test_each_number_that_is_given_has_an_option_that_changes_it(topic, capsys):
    for number in explained(topic)["inputs"]:
        other = "0.25" if number["value"] < 1 else "2" if number["option"] == "--virtual-stages" else "8"
        words = (topic, number["option"], other)
        if number["option"] == "--virtual-stages":
            words += ("--schedule", "interleaved")
        values = {entry["symbol"]: entry["value"] for entry in explained(*words)["inputs"]}
        assert values[number["symbol"]] == float(other), words


BAD = {
    "bubble --virtual-stages 3": "virtual-stages",
    "bubble --pipeline 0": "--pipeline",
    f"mfu --layers {'9' * 400}": "--layers",
    "allreduce --parameters many": "--parameters",
    "allreduce --bandwidth 0": "--bandwidth",
    "memory --recompute some": "--recompute",
    "memory --model llama-9": "--model",
    "memory --model llama-3.1-8b --layers 32": "--layers",
    "mfu --model llama-3.1-8b --width 64": "--width",
    "training-time --model llama-3.1-8b --parameters 8B": "--parameters",
    "juggling": "juggling",
    "": "Missing command",
}


@pytest.mark.parametrize("words", BAD, ids=lambda words: words[:40])
def test_bad_numbers_are_refused_in_one_line(words, capsys):
    assert run(["plan", "explain", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1 and BAD[words] in err


def test_results_are_written_as_one_says_them():
    numbers = (1.4e11, "bytes"), (0.15789, "share"), (6.3e24, "FLOPs"), (0.00134, "s"), (2.5e-6, "s")
    numbers += (27, "micro-batches"), (22.3, "s"), (4096 / 3, "outputs")
    said = "140 GB, 15.8 %, 6.3e+24 FLOPs, 1.34 ms, 2.5 us, 27 micro-batches, 22.3 s, 1,365.3 outputs"
    assert ", ".join(readable(*number) for number in numbers) == said
