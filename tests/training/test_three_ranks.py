"""Checkpoints written before layouts padded the vocabulary to other lengths go on on three ranks."""

import shutil
from pathlib import Path

import pytest
from support.configs import config
from support.round_trips import assert_same, weights
from support.short_runs import losses, tiny_recipe, train
from trilith.cli.app import run
from trilith.machine.random_files import write_tokens

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
