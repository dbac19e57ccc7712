"""Check the numbers measured beside the steps: alike in every layout, with no bit of the run changed."""

import json
import math
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.configs import TINY_GPT2
from support.pages import Page
from support.short_runs import run_recipe, tiny_recipe, write_recipe
from support.stop_and_go import differences
from support.token_files import batch_at
from transformers import AutoModelForCausalLM
from trilith.checkpoints import convert
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadInput, ParallelState
from trilith.recipes.recipe import parse_recipe
from trilith.runs.events import Events, read_events
from trilith.runs.metrics import read_metrics
from trilith.testing import RankError, run_parallel
from trilith.training import Callback, Trainer
from trilith.training.run_data import open_held_out
from trilith.training.run_plan import plan

#: 5 held-out samples: neither 2 data ranks nor micro-batches of 2 divide them.
EVALUATION = {"every": 2, "samples": 5}
LORA = {"r": 2, "target_modules": ["v_proj"]}
WATCH = {"norms": 3, "activation_norms": True, "trackers": ["tensorboard"]}
LAYOUTS = {
    "one": {},
    "sp2": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "dp2-zero3": {"data": 2, "zero": 3},
    "cp2": {"context": 2},
    "pp2-chunked": {"pipeline": 2},
}
#: Of training alone: an evaluation has neither.
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.01}
#: Where the logits are made a few tokens at a time, and blocks are computed twice.
SPARING = {"memory": {"loss_chunk": 7, "checkpointing": "full"}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("callbacks")
    write_tokens(folder / "tokens")
    write_tokens(folder / "held-out", seed=5)
    return folder


def run(raw):
    recipe = parse_recipe(raw)
    if not Path(recipe.out).exists():
        run_parallel(run_recipe, recipe.layout.world, raw)
    return Path(recipe.out)


def watched(place, name, *, model=None):
    """Run with all measurements, in one of ``LAYOUTS``; made once."""
    out = place / f"{name}-watched{'-gpt2-by-' * bool(model)}{(model or {}).get('implementation', '')}"
    raw = tiny_recipe(out, place / "tokens", steps=3, optimizer=SMOOTHED)
    raw |= {"layout": LAYOUTS[name], "watch": WATCH}
    raw["evaluation"] = EVALUATION | {"tokens": str(place / "held-out")}
    sparing = SPARING if name.endswith("chunked") else {}
    return run(raw | sparing | ({"model": {"config": model}} if model else {}))


def evaluations(out):
    found = read_metrics(out / "metrics.jsonl")
    return {line["step"] + 1: line["evaluation_loss"] for line in found if "evaluation_loss" in line}


@pytest.mark.parametrize("name", ["sp2", "pp2", "dp2-zero3", "cp2", "pp2-chunked"])
def test_evaluation_and_norms_are_the_same_in_every_layout(place, name):
    one, other = watched(place, "one"), watched(place, name)
    expected, found = evaluations(one), evaluations(other)
    assert expected.keys() == found.keys() == {2, 3}
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-10)
    (expected_norms,), (norms,) = (read_metrics(out / "norms.jsonl") for out in (one, other))
    assert expected_norms.keys() == norms.keys() == {"step", "weights", "gradients", "activations"}
    for kind in ("weights", "gradients", "activations"):
        assert norms[kind].keys() == expected_norms[kind].keys()
        largest = max(expected_norms[kind].values())
        for parameter, norm in expected_norms[kind].items():
            assert norms[kind][parameter] == pytest.approx(norm, rel=1e-10, abs=1e-12 * largest), parameter


@pytest.mark.parametrize("name", ["one", "pp2", "dp2-zero3"])
def test_watching_changes_no_bit_of_a_run_with_dropout(place, name):
    seen = watched(place, name, model=TINY_GPT2)
    how = {"steps": 3, "optimizer": SMOOTHED, "layout": LAYOUTS[name], "model": {"config": TINY_GPT2}}
    alone = run(tiny_recipe(place / f"{name}-alone", place / "tokens", **how))
    assert differences(alone, seen, but=["evaluation_loss", "evaluation_perplexity"]) == []


@pytest.mark.parametrize("by", [{}, {"implementation": "transformers"}], ids=["ours", "transformers"])
def test_the_evaluation_is_transformers_loss_and_the_norms_are_the_exported_weights(place, by):
    out = watched(place, "one", model=TINY_GPT2 | by)
    convert(out, out / "hf", to="hf")
    theirs = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float64).eval()
    raw = json.loads((out / "events.jsonl").read_text().splitlines()[0])["recipe"]
    held_out = open_held_out(parse_recipe(raw), 131)
    assert held_out is not None and held_out.samples == 5
    batch = batch_at(held_out.batches, 0)
    with torch.no_grad():
        logits = theirs(batch.input_ids[:5]).logits
    loss = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels[:5].flatten()))
    assert evaluations(out)[3] == pytest.approx(loss, rel=1e-10)
    last = read_metrics(out / "metrics.jsonl")[-1]
    assert last["evaluation_perplexity"] == pytest.approx(math.exp(loss), rel=1e-9)

    (norms,) = read_metrics(out / "norms.jsonl")
    parameters = dict(theirs.named_parameters())
    assert norms["weights"].keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert norms["weights"][name] == pytest.approx(float(parameter.detach().norm()), rel=1e-10)
    assert [*norms["activations"]] == ["transformer.h.0", "transformer.h.1", "transformer.h.2"]
    squares = sum(norm**2 for norm in norms["gradients"].values())
    assert math.sqrt(squares) == pytest.approx(last["grad_norm"], rel=1e-10)


def test_lora_s_norms_have_peft_s_names_and_the_base_hugging_face_s(place):
    raw = tiny_recipe(place / "lora", place / "tokens", steps=1, watch={"norms": 1, "peak_flops": 1e12})
    raw |= {"model": {"init_from": str(watched(place, "one"))}, "lora": LORA}
    (line,) = read_metrics(run(raw) / "norms.jsonl")
    frozen = line["weights"].keys() - line["gradients"].keys()
    assert frozen == read_metrics(watched(place, "one") / "norms.jsonl")[0]["weights"].keys()
    assert {name.rpartition(".lora_")[2] for name in line["gradients"]} == {"A.weight", "B.weight"}
    assert all(".self_attn.v_proj.lora_" in name for name in line["gradients"])
    events = [one["event"] for one in read_events(place / "lora" / "events.jsonl")]
    assert events == ["started", "saved", "finished"]


def test_tensorboard_that_is_not_installed_is_named(place, monkeypatch):
    monkeypatch.setattr("trilith.runs.trackers.find_spec", lambda name: None)
    raw = tiny_recipe(place / "none", place / "tokens", watch={"trackers": ["tensorboard"]})
    with pytest.raises(BadInput, match=r"tensorboard: .*pip install tensorboard accelerate"):
        plan(parse_recipe(raw))
    plan(parse_recipe(tiny_recipe(place / "none", place / "tokens")))


def test_traces_are_written_for_the_steps_and_ranks_asked_for(place):
    watch = {"trace_steps": [2], "trace_ranks": [1]}
    out = run(tiny_recipe(place / "traced", place / "tokens", steps=2, layout={"tensor": 2}, watch=watch))
    (trace,) = (out / "traces").iterdir()
    assert trace.name == "step-00000002.rank-00001.json"
    names = " ".join({str(one.get("name")) for one in json.loads(trace.read_text())["traceEvents"]})
    assert ("aten::mm" in names or "aten::addmm" in names) and "AdamW" in names


def test_the_callback_of_the_page_logs_its_figure(place, tmp_path, monkeypatch):
    (code,) = [code for code in Page.read("docs/watching.md").blocks("python") if "Callback" in code]
    monkeypatch.chdir(tmp_path)
    raw = tiny_recipe("run", place / "tokens", steps=3)
    write_recipe(Path("recipe.toml"), raw | {"watch": {"trackers": ["tensorboard"]}})
    exec(compile(code, "docs/watching.md", "exec"), {})
    lines = read_metrics(Path("run") / "metrics.jsonl")
    average, averages = lines[0]["loss"], []
    for line in lines:
        average = 0.9 * average + 0.1 * line["loss"]
        averages.append(average)
    assert [line["loss_average"] for line in lines] == pytest.approx(averages, rel=1e-12)


class Calls(Callback):
    """List its calls, and how often ranks talk to each other between the step's end and ``after``."""

    def __init__(self, name, calls, reductions, *, fails_at=None, figures=None):
        self.name, self.calls, self.reductions = name, calls, reductions
        self.fails_at, self.figures = fails_at, figures

    def begin(self, trainer, start):
        self.calls.append(f"{self.name} begins at {start}")
        assert all(torch.isfinite(weight).all() for weight in trainer.model.parameters())

    @contextmanager
    def around(self, number):
        self.calls.append(f"{self.name} enters {number}")
        yield
        self.calls.append(f"{self.name} leaves {number}")
        self.reductions.clear()

    def gradients(self, number, scale):
        self.calls.append(f"{self.name} sees {number} times {scale}")

    def after(self, metrics):
        self.calls.append(f"{self.name} after {metrics.step}, {len(self.reductions)} reductions")
        if metrics.step == self.fails_at:
            raise KeyError("of the user's")
        return self.figures

    def close(self, error):
        self.calls.append(f"{self.name} closes: {error!r}")


def run_with_calls(raw, fails_at=None, figures=None):
    """Return the calls of two callbacks on this rank; the second fails, or returns the figures."""
    recipe, calls, reductions, reduce = parse_recipe(raw), [], [], dist.all_reduce

    def all_reduce(*tensors, **options):
        reductions.append(tensors)
        return reduce(*tensors, **options)

    first = Calls("A", calls, reductions)
    second = Calls("B", calls, reductions, fails_at=fails_at, figures=figures)
    state = ParallelState.start(recipe.layout)
    trainer = Trainer(recipe, state, quiet=True, callbacks=[first, second])
    with mock.patch.object(dist, "all_reduce", all_reduce):
        try:
            trainer.run()
        except KeyError as error:
            calls.append(f"raised {error!r}")
    return calls


def calls_of_step(number):
    return [
        *[f"{name} enters {number}" for name in "AB"],
        *[f"{name} sees {number} times 1.0" for name in "AB"],
        *[f"{name} leaves {number}" for name in "BA"],
        *[f"{name} after {number}, 1 reductions" for name in "AB"],
    ]


def test_ranks_call_callbacks_in_order_and_a_step_ends_with_one_reduction(place, tmp_path):
    raw = tiny_recipe(tmp_path / "run", place / "tokens", steps=4, layout={"data": 2})
    raw["checkpoint"] = {"every": 2}
    error = KeyError("of the user's")

    def expected(start, stop, error):
        begins = [f"{name} begins at {start}" for name in "AB"]
        steps = [call for number in range(start, stop) for call in calls_of_step(number)]
        return [*begins, *steps, *(f"{name} closes: {error!r}" for name in "BA")]

    assert run_parallel(run_with_calls, 2, raw, 2) == [[*expected(0, 3, error), f"raised {error!r}"]] * 2
    (event,) = [line for line in read_events(tmp_path / "run" / "events.jsonl") if line["event"] == "failed"]
    assert event["step"] == 2 and event["why"] == str(error)
    assert run_parallel(run_with_calls, 2, raw) == [expected(2, 4, None)] * 2
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"loss": 1.0}, "Calls: loss: expected a name that no figure of the step has yet"),
        ({"own": 1.0}, "Calls: own: expected a name that no figure"),
        ({"norm": torch.ones(())}, r"Calls: norm: expected a number, found Tensor. .*float\(tensor\)"),
    ],
    ids=["taken", "reserved", "no number"],
)
def test_a_figure_that_cannot_be_logged_is_refused(place, tmp_path, figures, says):
    raw = tiny_recipe(tmp_path / "run", place / "tokens", steps=2)
    with pytest.raises(RankError, match=says):
        run_parallel(run_with_calls, 1, raw, None, figures)
    assert [line["event"] for line in read_events(tmp_path / "run" / "events.jsonl")] == ["started", "failed"]


def test_an_event_is_noted_without_reading_the_log(tmp_path):
    events = Events(tmp_path / "events.jsonl")
    events.note("saved", 1, checkpoint="a")
    with events.path.open("a") as log:
        log.write("x" * (8 << 20) + "\n")

    def read():
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read()
    events.note("saved", 2, checkpoint="b")
    assert read() - before < 1 << 16
