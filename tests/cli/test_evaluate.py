"""``trilith evaluate``: the loss that a run's evaluation prints, in every layout, and what it refuses."""

import json
import shutil
from unittest import mock

import pytest
from safetensors.torch import load_file, save_file
from support.configs import config
from support.inputs import write_adapter
from support.short_runs import tiny_recipe, train
from support.token_files import write_token_file
from trilith.checkpoints import convert
from trilith.cli.app import run
from trilith.data.text.tokenizer_loading import fingerprint_of_folder
from trilith.data.token_writer import TokenWriter
from trilith.generation import command
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadInput
from trilith.recipes.recipe import parse_recipe
from trilith.runs.metrics import read_metrics
from trilith.system.process_end import leave
from trilith.testing import run_fresh
from trilith.training import evaluation
from trilith.training.run_data import open_held_out


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a run that has evaluated 7 of its held-out rows, and its weights in Hugging Face format."""
    folder = tmp_path_factory.mktemp("evaluate")
    for name in ("tokens", "held-out"):
        write_tokens(folder / name)
    raw = tiny_recipe(folder / "run", folder / "tokens", steps=2, seed=0)
    train(raw | {"evaluation": {"tokens": str(folder / "held-out"), "every": 2, "samples": 7}})
    convert(folder / "run", folder / "hf", to="hf")
    return folder


def on_a_rank(words):
    leave(run(words))


def launch(words, world, status):
    """Start the ranks with torchrun's variables, but without its interpreters."""
    return max(run_fresh(on_a_rank, world, words, process_group=False))


def figures(capfd, *words):
    assert run(["evaluate", *map(str, words), "--device", "cpu", "--json"]) == 0
    return json.loads(capfd.readouterr().out)


ROWS = ("--sequence-length", "16", "--rows", "7", "--dtype", "fp64")


PIPELINE = ("--pipeline", "2", "--batch", "3")


@pytest.mark.parametrize("layout", [(), ("--tensor", "2"), pytest.param(PIPELINE, marks=pytest.mark.slow)])
def test_it_is_the_loss_of_a_run_in_every_layout(place, capfd, layout, monkeypatch):
    monkeypatch.setattr(command, "launch", launch)
    *_, last = read_metrics(place / "run" / "metrics.jsonl")
    shown = figures(capfd, place / "run", place / "held-out", *ROWS, *layout)
    assert shown["loss"] == pytest.approx(last["evaluation_loss"], rel=1e-10)
    assert shown["perplexity"] == pytest.approx(last["evaluation_perplexity"], rel=1e-9)
    assert (shown["rows"], shown["tokens"], shown["sequence_length"]) == (7, 112, 16)


def test_all_rows_are_those_of_a_run_of_any_seed_that_evaluates_all(place, capfd):
    raw = tiny_recipe(place / "seed-5", place / "tokens", steps=1, seed=5)
    (last,) = train(raw | {"evaluation": {"tokens": str(place / "held-out"), "samples": 10**6}})
    all_rows = ROWS[:2] + ROWS[4:]
    shown = figures(capfd, place / "seed-5", place / "held-out", *all_rows)
    assert shown["loss"] == pytest.approx(last.evaluation_loss, rel=1e-10) and shown["rows"] > 64
    drawn = figures(capfd, place / "seed-5", place / "held-out", *ROWS)
    assert drawn["loss"] != pytest.approx(last.evaluation_loss, rel=1e-6)


def test_a_hugging_face_folder_has_the_loss_of_its_run_and_adapters_change_it(place, capfd):
    own = figures(capfd, place / "run", place / "held-out", *ROWS)
    assert figures(capfd, place / "hf", place / "held-out", *ROWS) == own
    write_adapter(place / "adapter", place / "hf")
    more = ("--adapter", place / "adapter", "--batch", "3")
    with mock.patch.object(evaluation, "Step", wraps=evaluation.Step) as step:
        adapted = figures(capfd, place / "hf", place / "held-out", *ROWS, *more)
    assert adapted["loss"] != own["loss"] and adapted["rows"] == 7
    assert step.call_args.kwargs["micro_batch"] == 3


def test_all_rows_are_taken_at_the_length_of_the_model_and_printed_in_a_line(place, capfd):
    assert run(["evaluate", str(place / "hf"), str(place / "held-out"), "--device", "cpu"]) == 0
    printed = capfd.readouterr().out
    own = figures(capfd, place / "hf", place / "held-out")
    assert own["rows"] > 7 and own["tokens"] == own["rows"] * own["sequence_length"]
    counts = f"{own['tokens']:,} tokens of {own['rows']} rows of {own['sequence_length']}"
    assert printed == f"loss {own['loss']:.4f}  perplexity {own['perplexity']:.4g}  over {counts}\n"


def test_rows_are_as_long_as_in_the_run_unless_asked_otherwise(place, capfd):
    words = (place / "held-out", *ROWS[2:])
    own = figures(capfd, place / "run", *words)
    assert own == figures(capfd, place / "run", place / "held-out", *ROWS) and own["sequence_length"] == 16
    assert figures(capfd, place / "run", *words, "--sequence-length", "8")["sequence_length"] == 8


def test_a_loss_that_is_no_number_is_refused_and_one_without_a_perplexity_is_printed(place, capfd):
    shutil.copytree(place / "hf", place / "large")
    (file,) = (place / "large").glob("*.safetensors")
    save_file({name: 1e3 * weight for name, weight in load_file(file).items()}, file)
    asked = ["evaluate", str(place / "large"), str(place / "held-out"), *ROWS[:4], "--device", "cpu"]
    assert run([*asked, "--dtype", "fp16"]) == 2
    assert "evaluate: loss: expected a finite number, found nan. Its numbers" in capfd.readouterr().err
    assert run(asked) == 0 and "  perplexity inf  over" in capfd.readouterr().out


def test_padding_is_no_part_of_a_sample_where_its_length_changes_the_rotation(tmp_path, capfd):
    samples = [[*range(3, 12)], [*range(3, 20)], [*range(30, 42)]]  # longrope changes beyond 16 places
    learnt = [[False, *[True] * (len(ids) - 1)] for ids in samples]
    write_token_file(tmp_path / "chats", samples, learnt, vocab_size=503)
    data, losses = {"samples": "single", "global_batch": 3, "micro_batch": 3}, []
    model = {"config": config("phi3", initializer_range=0.3)}
    for length in (16, 48):
        raw = tiny_recipe(tmp_path / f"run-{length}", tmp_path / "chats", model=model, steps=1)
        raw["data"] |= data | {"sequence_length": length}
        (step,) = train(raw | {"evaluation": {"tokens": str(tmp_path / "chats")}})
        words = (tmp_path / "run-16", tmp_path / "chats", "--sequence-length", length, "--dtype", "fp64")
        losses.append((step.loss, step.evaluation_loss, figures(capfd, *words)["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


def test_tokens_of_another_tokenizer_are_refused(place, capfd):
    shutil.copytree(place / "hf", place / "named")
    (place / "named" / "tokenizer.json").write_text("{}")
    own = fingerprint_of_folder(place / "named")
    for name, fingerprint, code in (("theirs", "b", 2), ("unnamed", "", 0), ("ours", own, 0)):
        write_token_file(place / name, [range(20)] * 9, vocab_size=20, tokenizer_fingerprint=fingerprint)
        words = ["evaluate", str(place / "named"), str(place / name), *ROWS]
        assert run([*words, "--device", "cpu"]) == code
        assert ("tokens of the model's tokenizer" in capfd.readouterr().err) == bool(code)


def test_the_tokenizer_of_the_tokens_may_have_been_saved_again(place, capfd):
    shutil.copytree(place / "hf", place / "again")
    (place / "tokenizer").mkdir()
    stated = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (place / "tokenizer" / "tokenizer.json").write_text(json.dumps(stated))
    own = fingerprint_of_folder(place / "tokenizer")
    with TokenWriter(
        place / "named", vocab_size=20, tokenizer=place / "tokenizer", tokenizer_fingerprint=own
    ) as writer:
        writer.add([*range(20)] * 9)
        writer.commit()
    for vocabulary, code in (({"a": 0}, 0), ({"b": 0}, 2)):
        changed = json.dumps({"model": stated["model"] | {"vocab": vocabulary}}, indent=2)
        (place / "again" / "tokenizer.json").write_text(changed)
        words = ["evaluate", str(place / "again"), str(place / "named"), *ROWS, "--device", "cpu"]
        assert run(words) == code
        assert ("in place of the model's" in capfd.readouterr().err) == bool(code)


def test_rows_without_a_token_to_learn_are_refused(place, capfd):
    write_token_file(place / "cut", [range(30)] * 9, [[False] * 20 + [True] * 10] * 9, vocab_size=40)
    raw = tiny_recipe(place / "cut-run", place / "tokens", steps=1)
    raw["data"] |= {"overlong": "truncate", "sequence_length": 16}
    recipe = parse_recipe(raw | {"evaluation": {"tokens": str(place / "cut")}})
    with pytest.raises(
        BadInput, match=r"evaluation\.samples: .* a token to learn, found none in 9 rows of 16"
    ):
        open_held_out(recipe, 131)
    targets = [[False] * 17] * 50 + [[True] * 17]  # a row each; the last is not among the seven drawn
    write_token_file(place / "seldom", [range(17)] * 51, targets, vocab_size=40)
    assert run(["evaluate", str(place / "hf"), str(place / "seldom"), "--device", "cpu", *ROWS]) == 2
    assert "--rows: expected rows with a token to learn" in capfd.readouterr().err
