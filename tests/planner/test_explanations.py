"""``trilith plan explain``: the text of a formula gives what ``planner.formulas`` gives."""

import json
from math import ceil, log2
from types import SimpleNamespace

import pytest
from trilith.cli.app import run
from trilith.cli.shared.topics import read_table
from trilith.pipeline.bubble import bubble_share, micro_batches_for
from trilith.planner.explanations.explanation import evaluate, readable
from trilith.planner.formulas import axis_bytes, training_time
from trilith.planner.formulas.activation_bytes import block_activation_bytes
from trilith.planner.formulas.bytes_per_parameter import state_bytes
from trilith.planner.formulas.ring_and_tree import (
    ring_seconds,
    ring_wire_bytes,
    tree_all_reduce_seconds,
    tree_all_reduce_wire_bytes,
)
from trilith.simulation.model_flops import utilization

TOPICS = read_table()[1]


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


def option(words, flag, default):
    return words[words.index(flag) + 1] if flag in words else default


def of_bubble(at, words):
    schedule = option(words, "--schedule", "1f1b")
    share = bubble_share(at.p, at.m, at.v, schedule=schedule)
    values = {"bubble": share, "efficiency": 1 - share, "overhead": share / (1 - share)}
    return values | ({"needed": micro_batches_for(at.b, at.p, at.v)} if hasattr(at, "b") else {})


def of_pipeline(at, words):
    border = axis_bytes.pipeline_border_bytes(at.N, at.D, number_bytes=at.w)
    blocks = at.L / (at.p * at.v)
    return of_bubble(at, words) | {"blocks": blocks, "border": border, "seconds": border / at.W}


def of_allreduce(at, words):
    size, link = at.P * at.w, {"bytes_per_second": at.W, "latency_seconds": at.a}
    ring = {"B": size, "ring": ring_wire_bytes("all_reduce", size, at.N)}
    ring["ring_time"] = ring_seconds("all_reduce", size, at.N, **link)
    ring["scatter"] = ring_wire_bytes("reduce_scatter", size, at.N)
    tree = {"tree": tree_all_reduce_wire_bytes(size, at.N)}
    tree["tree_time"] = tree_all_reduce_seconds(size, at.N, **link)
    return ring | (tree if at.N > 1 else {})


def sizes_of(at):
    return {"weight_bytes": at.w, "gradient_bytes": at.g, "optimizer_bytes": at.o}


def of_zero(at, words):
    stages = [state_bytes(at.P, zero=zero, data_ranks=at.N, **sizes_of(at)) for zero in range(4)]
    return {f"zero_{zero}": state.total for zero, state in enumerate(stages)}


def of_memory(at, words):
    own, zero = at.P / (at.t * at.p), int(option(words, "--zero", "0"))
    state = state_bytes(own, zero=zero, data_ranks=getattr(at, "N", 1), **sizes_of(at))
    block = block_activation_bytes(
        at.S * at.b,
        at.D,
        heads=getattr(at, "h", 0),
        sequence_length=at.S,
        tensor=at.t,
        sequence_parallel="--sequence-parallel" in words,
        recompute=option(words, "--recompute", "selective"),
    )
    model = {"own": own, "weights": state.weights, "gradients": state.gradients, "optimizer": state.optimizer}
    return model | {"block": block, "activations": at.L * block, "total": state.total + at.L * block}


def of_training_time(at, words):
    flops = training_time.training_flops(at.P, at.T)
    seconds = training_time.training_seconds(flops, devices=at.G, peak_flops_per_second=at.F, mfu=at.u)
    hours = training_time.device_hours(seconds, at.G)
    price, energy = training_time.price(hours, at.x), training_time.kilowatt_hours(hours, at.W)
    times = {"C": flops, "seconds": seconds, "days": seconds / training_time.DAY, "hours": hours}
    return times | {"price": price, "energy": energy}


def of_tensor_parallel(at, words):
    block = axis_bytes.tensor_block_bytes(at.N, at.D, at.t, number_bytes=at.w)
    shard = {"column": at.O / at.t, "row": at.I / at.t, "shard": at.I * at.O / at.t}
    model = {"block": block, "model": at.L * block, "seconds": at.L * block / at.W}
    return shard | {"tensor_bytes": at.N * at.D * at.w} | model


def of_context(at, words):
    tokens, width = at.S * at.b / at.c, 2 * at.h * at.d / at.t
    gather, ring = (
        axis_bytes.context_block_bytes(tokens, width, at.c, number_bytes=at.w, ring=ring)
        for ring in (False, True)
    )
    return {"N": tokens, "K": width, "gather": gather, "ring": ring, "seconds": gather / at.W}


def of_experts(at, words):
    block = axis_bytes.expert_block_bytes(at.N, at.D, at.k, at.e, number_bytes=at.w)
    model = {"block": block, "model": at.L * block, "seconds": at.L * block / at.W}
    return {"held": at.E / at.e, "copies": at.N * at.k * at.D * at.w} | model


def of_mfu(at, words):
    full, causal = (training_time.flops_of_token(at.P, at.L, at.A, at.S, causal=half) for half in (0, 1))
    peak = {"devices": at.G, "peak_flops_per_second": at.F}
    hardware = training_time.with_recomputation(causal)
    names = {"mfu_full": full, "mfu_causal": causal, "hfu": hardware}
    shares = {name: utilization(at.R, flops, **peak) for name, flops in names.items()}
    return {"full": full, "causal": causal} | shares


@pytest.mark.parametrize("words", [*CASES, ("bubble", "--target", "0.2")], ids=" ".join)
def test_what_is_computed_from_the_text_is_what_the_planner_computes(words, capsys):
    explanation = explained(capsys, *words)
    at = SimpleNamespace(**{number["symbol"]: number["value"] for number in explanation["given"]})
    expected = globals()[f"of_{words[0].replace('-', '_')}"](at, words)
    values = {step["symbol"]: step["value"] for step in explanation["steps"]}
    assert values == pytest.approx(expected, rel=1e-12)


def test_a_formula_is_exact_and_holds_arithmetic_alone():
    assert ceil((4 - 1) * (1 - 0.2) / 0.2) == 13  # rounded, and one too many
    assert evaluate("ceil((p - 1) * (1 - 0.2) / 0.2)", {"p": 4}) == 12
    assert evaluate("2 ** 3 + log2(8) - max(1, 2)", {}) == 9
    for text in ("[1]", "a.b", "f'{1}'"):
        with pytest.raises(ValueError, match="no arithmetic"):
            evaluate(text, {})


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
        (("mfu", "--layers", "9" * 400), "--layers"),
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
