"""Checkpoints between layouts that pad the vocabulary to other lengths, and those written before they did."""

import shutil
from pathlib import Path

import pytest
from support.configs import config
from support.round_trips import assert_same, weights
from support.short_runs import losses, tiny_recipe, train, whole_tensors
from support.stop_and_go import ROUNDING, StopAndGo, differences, stopped_and_gone_on
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens

#: Twelve heads: 2 and 3 ranks divide them. Vocabulary 131 takes 256 rows on 2 ranks, 384 on 3.
TWELVE = config("tiny_llama_of_12_heads")
#: ``run`` was written by the version that padded vocabularies alike in every layout (its manifest was sealed
#: later), ``run_version_2`` by the last one whose manifest listed every part.
BEFORE = Path(__file__).parents[1] / "checkpoints" / "written_before"
BETWEEN = StopAndGo(
    "2-to-3-to-2", [{"layout": {"tensor": tensor}} for tensor in (2, 3, 2)], {"model": {"config": TWELVE}}
)


@pytest.fixture(scope="module")
def between(tmp_path_factory):
    """Run the same training on one device, and on 2, then 3, then 2 tensor ranks."""
    return stopped_and_gone_on(BETWEEN, tmp_path_factory.mktemp("parts"), tmp_path_factory)


def test_a_run_goes_on_from_2_to_3_ranks_and_back_as_if_on_one(between):
    assert differences(*between, relative=ROUNDING) == []
    assert whole_tensors(between[1])["embed.weight"].shape == (131, 12)


def test_to_hugging_face_and_back_over_three_ranks_changes_no_bit(between, tmp_path):
    steps = between[1] / "checkpoints"
    for number, source in enumerate(("step-00000002", "step-00000004")):  # of 2 ranks, and of 3
        hf, cut, again = (tmp_path / f"{name}{number}" for name in ("hf", "cut", "again"))
        assert run(["convert", str(steps / source), str(hf), "--to", "hf", "--verify"]) == 0
        assert run(["convert", str(hf), str(cut), "--tensor", "3", "--verify"]) == 0
        assert run(["convert", str(cut), str(again), "--to", "hf"]) == 0
        assert_same(weights(again), weights(hf))
        assert weights(hf)["model.embed_tokens.weight"].shape == (131, 12)


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
