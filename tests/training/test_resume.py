"""Stopping and resuming: bitwise in the same layout, to 1e-10 in another, and never with other data."""

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from support.configs import TINY_GPT2, TINY_LLAMA
from support.folders import contents
from support.short_runs import losses, tiny_recipe, train, whole_tensors
from trilith.checkpoints import Manifest, read_source
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens
from trilith.parallel_state import BadCheckpoint, BadInput
from trilith.recipes.recipe import parse_recipe
from trilith.testing import RankError

if TYPE_CHECKING:
    pass

FOUR_GPT2 = {**TINY_GPT2, "n_layer": 4}

SAME = [
    pytest.param({}, {}, id="D1-one-process"),
    pytest.param({"tensor": 2}, {}, id="D1-tp2", marks=pytest.mark.slow),
    pytest.param({"tensor": 2, "sequence": True}, {}, id="D1-sp", marks=pytest.mark.slow),
    pytest.param({"data": 2}, {}, id="D1-dp2", marks=pytest.mark.slow),
    pytest.param({"data": 2, "zero": 1}, {}, id="D1-zero1", marks=pytest.mark.slow),
    pytest.param({"data": 2, "zero": 3}, {}, id="D1-zero3"),
    pytest.param({"tensor": 2, "pipeline": 2}, {}, id="D1-tp2-pp2", marks=pytest.mark.slow),
    pytest.param({"tensor": 2}, {"model": {"config": TINY_GPT2}}, id="D1-dropout-tp2"),
    pytest.param(
        {"pipeline": 2}, {"model": {"config": TINY_GPT2}}, id="D1-dropout-pp2", marks=pytest.mark.slow
    ),
    pytest.param(
        {"context": 2, "ring": True},
        {"model": {"config": TINY_GPT2}},
        id="D1-dropout-cp2",
    ),
    pytest.param({"context": 2, "zero": 1}, {}, id="D1-cp2-zero1", marks=pytest.mark.slow),
    pytest.param(
        {"pipeline": 2, "schedule": "zbv"},
        {"model": {"config": FOUR_GPT2}, "data": {"micro_batch": 1}},
        id="D1-dropout-zbv",
    ),
]

OTHER = [
    pytest.param({"tensor": 2}, {}, id="D4-tp2-to-one"),
    pytest.param({}, {"tensor": 4, "sequence": True}, id="D4-one-to-tp4-sp", marks=pytest.mark.slow),
    pytest.param({"data": 2}, {"data": 4, "zero": 1}, id="D4-dp2-to-zero1", marks=pytest.mark.slow),
    pytest.param({"pipeline": 2}, {"tensor": 2}, id="D4-pp2-to-tp2", marks=pytest.mark.slow),
    pytest.param({"tensor": 2, "pipeline": 2}, {"data": 2, "zero": 1}, id="D4-tp2-pp2-to-zero1"),
    pytest.param({"context": 2, "data": 2, "zero": 1}, {"tensor": 2}, id="D4-cp2-zero1-to-tp2"),
    pytest.param({"data": 2}, {"context": 2}, id="D4-dp2-to-cp2", marks=pytest.mark.slow),
    pytest.param({"data": 4, "zero": 3}, {"pipeline": 3, "split": [1, 1, 1]}, id="D4-zero3-to-pp3"),
    pytest.param(
        {"data": 2, "zero": 2},
        {"tensor": 2, "data": 2, "zero": 3},
        id="D4-zero2-to-tp2-zero3",
        marks=pytest.mark.slow,
    ),
]


@pytest.fixture
def tokens(tmp_path):
    return write_tokens(tmp_path / "tokens")


@pytest.mark.parametrize(("layout", "changes"), SAME)
def test_resuming_in_the_same_layout_is_bitwise(tmp_path, tokens, layout, changes):
    raw = {"layout": layout, "steps": 3, **changes}
    train(tiny_recipe(tmp_path / "whole", tokens, **raw))
    train(tiny_recipe(tmp_path / "parts", tokens, **raw, stop_after=1))
    train(tiny_recipe(tmp_path / "parts", tokens, **raw, stop_after=2))
    train(tiny_recipe(tmp_path / "parts", tokens, **raw))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 3
    whole, parts = whole_tensors(tmp_path / "whole"), whole_tensors(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in whole)
    different = [name for name in whole if not torch.equal(whole[name], parts[name])]
    assert not different


def test_saving_in_the_background_changes_no_bit_D2(tmp_path, tokens):
    layout = {"tensor": 2, "data": 2, "zero": 1}
    background = {"checkpoint": {"background": True, "every": 1}}
    train(tiny_recipe(tmp_path / "whole", tokens, layout=layout, steps=4))
    train(tiny_recipe(tmp_path / "parts", tokens, layout=layout, steps=4, stop_after=2, **background))
    train(tiny_recipe(tmp_path / "parts", tokens, layout=layout, steps=4, **background))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = whole_tensors(tmp_path / "whole"), whole_tensors(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert not [name for name in whole if not torch.equal(whole[name], parts[name])]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Return the output folder of a run on one process that was never stopped."""
    folder = tmp_path_factory.mktemp("one-process")
    train(tiny_recipe(folder / "whole", write_tokens(folder / "tokens"), steps=4))
    return folder / "whole"


@pytest.mark.parametrize(("before", "after"), OTHER)
def test_resuming_in_another_layout_goes_on_as_if_nothing_had_changed(
    tmp_path, tokens, one_process, before, after
):
    raw = {"steps": 4, "data": {"micro_batch": 1}}
    train(tiny_recipe(tmp_path / "parts", tokens, layout=before, stop_after=2, **raw))
    train(tiny_recipe(tmp_path / "parts", tokens, layout=after, **raw))
    whole, parts = losses(one_process), losses(tmp_path / "parts")
    assert len(whole) == len(parts) == 4
    for one, other in zip(whole, parts, strict=True):
        assert other == pytest.approx(one, rel=1e-10)
    expected, found = whole_tensors(one_process), whole_tensors(tmp_path / "parts")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=1e-10 * float(tensor.abs().max()), msg=name
        )


def test_going_on_under_another_schedule_changes_nothing(tmp_path, tokens):
    """Each rank then holds other blocks; evaluation on the way does not disturb either."""
    four = {"model": {"config": {**TINY_LLAMA, "num_hidden_layers": 4}}, "data": {"micro_batch": 1}}
    four |= {"steps": 3, "evaluation": {"tokens": str(tokens), "every": 1, "samples": 3}}
    train(tiny_recipe(tmp_path / "whole", tokens, **four))
    steps = [
        {"pipeline": 2, "schedule": "zbv", "data": 2, "zero": 3},
        {"pipeline": 2, "schedule": "interleaved"},
        {"pipeline": 2, "schedule": "1f1b"},
    ]
    for number, layout in enumerate(steps, 1):
        train(tiny_recipe(tmp_path / "parts", tokens, layout=layout, stop_after=number, **four))
    for one, other in zip(losses(tmp_path / "whole"), losses(tmp_path / "parts"), strict=True):
        assert other == pytest.approx(one, rel=1e-10)
    evaluated = [read_evaluations(tmp_path / name) for name in ("whole", "parts")]
    assert len(evaluated[0]) == 3 and evaluated[1] == pytest.approx(evaluated[0], rel=1e-10)
    expected, found = whole_tensors(tmp_path / "whole"), whole_tensors(tmp_path / "parts")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=1e-10 * float(tensor.abs().max()), msg=name
        )


def read_evaluations(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["evaluation_loss"] for line in lines]


def test_two_runs_with_one_seed_are_bitwise_equal_and_another_seed_is_not_D0(tmp_path, tokens):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(tiny_recipe(tmp_path / name, tokens, seed=seed, layout={"data": 2}, steps=2))
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")
    one, same, other = (whole_tensors(tmp_path / name) for name in "abc")
    assert one.keys() == same.keys()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"seed": 4}, id="seed"),
        pytest.param({"data": {"global_batch": 4}}, id="global-batch"),
        pytest.param({"data": {"sequence_length": 8}}, id="sequence-length"),
    ],
)
def test_a_run_is_not_resumed_with_another_order_of_samples(tmp_path, tokens, changes):
    train(tiny_recipe(tmp_path / "run", tokens, stop_after=2))
    with pytest.raises(RankError, match=r"Resume with the data that the run began with"):
        train(tiny_recipe(tmp_path / "run", tokens, **changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_is_not_resumed_in_another_dtype(tmp_path, tokens, dtype):
    train(tiny_recipe(tmp_path / "run", tokens, stop_after=2))
    before = contents(tmp_path / "run" / "checkpoints")
    expected = f"dtype: expected float64, as the run's weights and moments are, found {dtype}. Resume with"
    with pytest.raises(RankError, match=expected):
        train(tiny_recipe(tmp_path / "run", tokens, dtype=dtype))
    assert contents(tmp_path / "run" / "checkpoints") == before
    model = {"config": None, "init_from": str(tmp_path / "run")}
    train(tiny_recipe(tmp_path / "new", tokens, dtype=dtype, model=model, steps=1))


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


def test_a_run_is_not_resumed_with_other_tokens_F12(tmp_path, tokens):
    train(tiny_recipe(tmp_path / "run", tokens, stop_after=2))
    other = write_tokens(tmp_path / "other", seed=1)
    with pytest.raises(RankError, match=r"data\.fingerprint"):
        train(tiny_recipe(tmp_path / "run", other))


def test_a_checkpoint_of_another_model_is_refused_by_name_G13(tmp_path, tokens):
    train(tiny_recipe(tmp_path / "run", tokens, stop_after=2))
    config = tiny_recipe(tmp_path, tokens)["model"]["config"] | {"intermediate_size": 64}
    with pytest.raises(RankError, match=r"intermediate_size: expected 64, found 48"):
        train(tiny_recipe(tmp_path / "run", tokens, model={"config": config}))


def test_weights_alone_start_a_run_but_do_not_resume_one(tmp_path, tokens):
    train(tiny_recipe(tmp_path / "first", tokens))
    raw = tiny_recipe(tmp_path / "second", tokens, steps=1, model={"init_from": str(tmp_path / "first")})
    raw["model"].pop("config")
    train(raw)
    continued, scratch = (
        losses(tmp_path / "second")[0][0],
        losses(tmp_path / "first")[0][0],
    )
    assert continued < scratch - 0.01


def test_old_checkpoints_go_only_after_the_new_one_is_complete(tmp_path, tokens):
    train(tiny_recipe(tmp_path / "run", tokens, checkpoint={"every": 1, "keep": 2}))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000005", "step-00000006"]


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
    assert read_source(out).path.name == "step-00000004"


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


def test_a_recipe_that_contradicts_itself_is_refused_before_anything_starts(tmp_path, tokens):
    with pytest.raises(BadInput, match=r"data\.global_batch"):
        parse_recipe(tiny_recipe(tmp_path, tokens, layout={"data": 3}))


def test_a_flipped_bit_is_seen_before_a_run_goes_on_G8(tmp_path, tokens):
    train(tiny_recipe(tmp_path / "run", tokens, stop_after=2))
    (file,) = (tmp_path / "run" / "checkpoints").glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(RankError, match=r"CRC-32: expected [0-9a-f]{8}, found [0-9a-f]{8}"):
        train(tiny_recipe(tmp_path / "run", tokens))
