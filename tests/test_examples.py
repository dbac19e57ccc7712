"""The example of docs/your_model.md: one model in every layout; trained, cut anew, exported, imported."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trilith.checkpoints import load_module
from trilith.cli.app import run
from trilith.models.base.hugging_face_names import expand
from trilith.parallel_state import Layout, initialize
from trilith.testing import assert_layout_invariant, run_parallel

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name):
    """Under its own name, as other processes find it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


custom, plain = example("custom_model"), example("plain_model")


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (Layout(tensor=2, pipeline=2, sequence=True), None),
        (Layout(pipeline=4), None),  # between its decoder blocks memory and state travel together
        *(
            pytest.param(layout, schedule, marks=pytest.mark.slow)
            for layout, schedule in (
                (Layout(tensor=4), None),
                (Layout.of(tensor=2, data=2, zero=3, sequence=True), None),
                (Layout.of(pipeline=2, data=2, zero=2), None),
                (Layout(pipeline=2, virtual_stages=2, v_shape=True), None),
                (Layout(tensor=2, pipeline=2, sequence=True), "gpipe"),
                (Layout(pipeline=4), "gpipe"),
                (Layout.of(pipeline=2, data=2, zero=2), "gpipe"),
            )
        ),
    ],
    ids=str,
)
def test_the_example_is_one_model_in_every_layout(layout, schedule):
    batch = custom.batch(0, samples=4, frames=4, length=4)
    how = {"loss": custom.loss, "schedule": schedule}
    differences = assert_layout_invariant(custom.Transcriber, batch, layouts=[layout], **how)
    assert differences[layout].gradients < 1e-10


def stretch(layout, out, steps):
    return custom.train(layout, out, steps)


def test_the_example_is_trained_resumed_in_another_layout_cut_anew_exported_and_imported(tmp_path):
    whole = run_parallel(stretch, 1, Layout(), tmp_path / "whole", 12)[0]
    run_parallel(stretch, 2, Layout(tensor=2, sequence=True), tmp_path / "run", 6)
    second = run_parallel(stretch, 2, Layout(pipeline=2), tmp_path / "run", 12)[1]
    assert whole[-1] < whole[0] - 0.3
    assert torch.allclose(torch.tensor(second), torch.tensor(whole[6:]), rtol=1e-4)

    assert run(["reshard", str(tmp_path / "run"), str(tmp_path / "cut"), "--tensor", "4"]) == 0
    assert run(["diff", str(tmp_path / "run"), str(tmp_path / "cut")]) == 0
    assert run(["verify", str(tmp_path / "cut")]) == 0
    assert run(["convert", str(tmp_path / "cut"), str(tmp_path / "exported"), "--to", "hf"]) == 0
    theirs = plain.Transcriber()
    theirs.load_state_dict(load_file(tmp_path / "exported" / "model.safetensors"))
    ours, again = custom.Transcriber(), custom.Transcriber()
    load_module(tmp_path / "run", ours)
    load_module(tmp_path / "exported", again, names=custom.NAMES)
    given = {name: one for name, one in custom.batch(99).items() if name != "labels"}
    assert torch.allclose(theirs(**given), ours(**given), atol=1e-5)
    assert torch.equal(again(**given), ours(**given))


def test_the_plain_model_and_ours_have_the_same_gradients():
    theirs, ours = plain.Transcriber().double(), custom.Transcriber().double()
    initialize(ours, 3)
    links, _ = expand(custom.NAMES, {n: tuple(p.shape) for n, p in ours.named_parameters()}, 2)
    mine = dict(ours.named_parameters())
    theirs.load_state_dict({link.hf: mine[link.ours].detach() for link in links})
    batch = {n: one.double() if one.is_floating_point() else one for n, one in custom.batch(0).items()}
    labels = batch.pop("labels")
    plain.loss(theirs(**batch), labels).backward()
    total, count = custom.loss(ours(**batch), {"labels": labels})
    (total / count).backward()
    gradients = dict(theirs.named_parameters())
    for link in links:
        pair = gradients[link.hf].grad, mine[link.ours].grad
        assert torch.allclose(*pair, rtol=1e-9, atol=1e-12), link.ours


@pytest.mark.slow
def test_torchrun_takes_any_layout_from_the_command_line(tmp_path):
    def launch(ranks, *arguments):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command = [*launcher, str(EXAMPLES / "custom_model.py"), "train", "--out", str(tmp_path), *arguments]
        how = {"capture_output": True, "text": True, "timeout": 240, "check": True}
        return subprocess.run(command, **how).stdout

    assert "loss" in launch(4, "--tensor", "2", "--pipeline", "2", "--sequence", "--steps", "3")
    assert "in 2 steps" in launch(2, "--data", "2", "--zero", "3", "--steps", "5")
