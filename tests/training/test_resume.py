"""Checkpoints of a run: which one it goes on from, which ones stay, and what it says."""

import re
import shutil
from pathlib import Path

import pytest
from support.configs import config
from support.folders import contents
from support.round_trips import assert_same, weights
from support.short_runs import losses, tiny_recipe, train
from trilith.checkpoints import Manifest, read_source
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadCheckpoint, ParallelState, PeerFailed
from trilith.recipes.recipe import parse_recipe
from trilith.runs.events import outcome, read_events
from trilith.runs.metrics import read_metrics
from trilith.storage.small_files import log_line
from trilith.testing import RankError
from trilith.training import Trainer


def test_a_resumed_run_says_which_keys_of_its_recipe_have_changed(make, capfd):
    """A run may go on with another learning rate or precision, but not without a word."""
    command = ["train", str(make(4).recipe), "layout.data=1", "layout.zero=0"]
    assert run([*command, "stop_after=2"]) == 0
    assert run([*command, "stop_after=3"]) == 0
    capfd.readouterr()
    assert run([*command, "compute=bfloat16", "optimizer.lr=0.02"]) == 0
    said = capfd.readouterr().out
    changes = 'stop_after: 3, now null; compute: null, now "bfloat16"; optimizer.lr: 0.0003, now 0.02'
    assert f"changed in the recipe since the last start: {changes}\n" in said


def test_a_run_says_on_what_device_it_computes_and_that_it_was_another(make, capfd):
    recipe = make(4)
    command = ["train", str(recipe.recipe), "layout.data=1", "layout.zero=0"]
    assert run([*command, "stop_after=2"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("device: cpu\n")
    assert re.search(r"^data: \d+ rows, [\d.]+ epochs$", out, re.MULTILINE)
    events = recipe.out / "events.jsonl"
    (event, *_) = read_events(events)
    assert event["recipe"]["device"] == "cpu"  # found out: the recipe says auto
    events.write_text(log_line(event | {"recipe": event["recipe"] | {"device": "cuda"}}) + "\n")
    with (recipe.out / "metrics.jsonl").open("a") as metrics:  # as if it had gone on, and had been killed
        metrics.write('{"step": 6}\n')
    assert run([*command, "stop_after=2"]) == 0
    assert [line["reached"] for line in read_events(events) if "reached" in line] == [0, 7]
    changes = 'since the last start: device: "cuda", now "cpu"\n'
    assert changes in capfd.readouterr().out


def test_a_trainer_on_one_device_needs_no_process_group(tmp_path, tokens):
    """Neither for norms nor to name what is not finite; it notes its device in place of ``auto``."""
    changes = {"device": "auto", "watch": {"norms": 1}, "optimizer": {"lr": 1e30, "schedule": "constant"}}
    recipe = parse_recipe(tiny_recipe(tmp_path / "run", tokens, dtype="float32", **changes))
    trainer = Trainer(recipe, ParallelState.alone(), quiet=True)
    assert trainer.recipe.device == "cpu"
    with pytest.raises(PeerFailed, match=r"step 2: rank 0: the output of .* is not finite"):
        trainer.run()
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "norms.jsonl")] == [0]


def test_weights_alone_start_a_run_in_any_dtype(tmp_path, tokens):
    train(tiny_recipe(tmp_path / "first", tokens))
    model = {"config": None, "init_from": str(tmp_path / "first")}
    for dtype in ("float32", "bfloat16"):
        train(tiny_recipe(tmp_path / dtype, tokens, dtype=dtype, model=model, steps=1))
        assert losses(tmp_path / dtype)[0][0] < losses(tmp_path / "first")[0][0] - 0.01


def test_damaged_checkpoints_count_for_nothing_and_the_last_good_one_stays(tmp_path, tokens):
    """Two newer ones are damaged; a run that ends before their steps keeps what it commits."""
    out = tmp_path / "run"
    train(tiny_recipe(out, tokens, checkpoint={"every": 1, "keep": 9}))
    for step in (5, 6):
        file = next((out / "checkpoints" / f"step-{step:08d}").glob("rank-*"))
        file.write_bytes(file.read_bytes()[:-1])
    for step in (1, 2, 3):
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    (out / "checkpoints" / "step-00000004").rename(out / "checkpoints" / "step-00000003")
    manifest = out / "checkpoints" / "step-00000003" / "manifest.json"
    written = Manifest.parse(manifest.read_bytes(), manifest)
    state = written.state | {"memory": written.state["memory"] | {"updates": 3}}
    manifest.write_bytes(written.model_copy(update={"step": 3, "state": state}).to_bytes())
    train(tiny_recipe(out, tokens, checkpoint={"keep": 1}, stop_after=4))
    left = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert left == ["step-00000004", "step-00000005", "step-00000006"]
    with pytest.warns(UserWarning, match="passed over: .*; using step-00000004"):
        assert read_source(out).path.name == "step-00000004"
    for keep in (2, 3):  # also at a start that has not passed them over, since a newer one is good
        train(tiny_recipe(out, tokens, checkpoint={"keep": keep}, steps=5 + keep))
        left.append(f"step-{5 + keep:08d}")
        assert sorted(path.name for path in (out / "checkpoints").iterdir()) == left


def test_a_run_that_is_further_than_its_recipe_says_is_refused_and_one_that_is_done_says_so(make):
    run = make(2)
    assert run.ranks() == [0, 0]
    before = contents(run.out / "checkpoints")
    codes = run.ranks("steps=1")
    assert codes == [2, 2]
    for code in codes:
        assert "steps: expected at least 2" in code.output and "step-00000002" in code.output
    first, _ = codes = run.ranks(quiet=False)
    assert codes == [0, 0] and "nothing left to do: step 2 of 2 is done" in first.output
    assert outcome(run.out).text == "finished after step 2"
    assert contents(run.out / "checkpoints") == before


def test_two_checkpoints_of_one_step_under_different_names_are_refused(tmp_path, tokens):
    raw = tiny_recipe(tmp_path / "run", tokens, stop_after=2)
    train(raw)
    (written,) = (tmp_path / "run" / "checkpoints").iterdir()
    other = shutil.copytree(written, written.with_name("step-2"))
    for read in (lambda: read_source(tmp_path / "run"), lambda: train(raw)):
        with pytest.raises((BadCheckpoint, RankError), match=r"step 2: .*step-00000002, step-2"):
            read()
    assert {path.name for path in written.parent.iterdir()} == {written.name, other.name}
    shutil.rmtree(written)
    train(tiny_recipe(tmp_path / "run", tokens, stop_after=3))  # a name of another width counts by its number
    assert read_source(tmp_path / "run").path.name == "step-00000003"


def test_a_run_killed_in_its_first_save_begins_again(tmp_path, tokens):
    (tmp_path / "run" / "checkpoints" / "step-00000002.tmp-0123456789abcdef").mkdir(parents=True)
    train(tiny_recipe(tmp_path / "run", tokens, stop_after=2))
    assert len(losses(tmp_path / "run")) == 2


def test_a_damaged_newest_checkpoint_is_passed_over_and_written_again_G4(tmp_path, tokens):
    raw = tiny_recipe(tmp_path / "run", tokens, checkpoint={"every": 2})
    train(raw)
    before = losses(tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    (newest / "rank-00000-of-00001.safetensors").unlink()
    train(raw)
    assert losses(tmp_path / "run") == before
    assert read_source(newest).manifest is not None
    aside = contents(newest.with_name("step-00000006.damaged"))
    (newest / "manifest.json").unlink()
    train(raw)
    assert contents(newest.with_name("step-00000006.damaged")) == aside
    assert (newest.with_name("step-00000006.damaged-2") / "rank-00000-of-00001.safetensors").exists()
    assert read_source(newest).manifest is not None


#: ``run`` was written by the version that padded vocabularies alike in every layout (its manifest was sealed
#: later), ``run_version_2`` by the last one whose manifest listed every part.
BEFORE = Path(__file__).parents[1] / "checkpoints" / "written_before"


@pytest.mark.parametrize("kind", ["run", "run_version_2"])
def test_what_was_written_before_is_verified_and_cut_anew(kind, tmp_path):
    folder = shutil.copytree(BEFORE / kind, tmp_path / kind)
    assert run(["verify", str(folder)]) == 0
    assert run(["reshard", str(folder), str(tmp_path / "cut"), "--tensor", "3"]) == 0
    assert run(["diff", str(folder), str(tmp_path / "cut")]) == 0
    for source, out in ((folder, "a"), (tmp_path / "cut", "b")):
        assert run(["convert", str(source), str(tmp_path / out), "--to", "hf"]) == 0
    assert_same(weights(tmp_path / "a"), weights(tmp_path / "b"))


def test_a_run_written_before_goes_on_on_three_ranks(tmp_path):
    shutil.copytree(BEFORE / "run", tmp_path / "run" / "checkpoints")
    tokens = write_tokens(tmp_path / "tokens", count=400, vocab_size=13)
    one, three = shutil.copytree(tmp_path / "run", tmp_path / "one"), tmp_path / "run"
    smaller = {"vocab_size": 13, "intermediate_size": 12, "max_position_embeddings": 16}
    model = config("tiny_llama_of_12_heads", layers=1, **smaller)
    for out, layout in ((one, {}), (three, {"tensor": 3})):
        data = {"sequence_length": 8, "global_batch": 8}
        raw = tiny_recipe(out, tokens, steps=4, dtype="float32", layout=layout, data=data)
        train(raw | {"model": {"config": model}})
    for a, b in zip(losses(one), losses(three), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert len(losses(one)) == 2
