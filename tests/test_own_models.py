"""The examples and docs/your_model.md: one model in every layout; trained, cut anew, exported, imported."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.pages import Page
from support.short_runs import losses, train
from support.strangers import CUSTOM as custom
from support.strangers import EXAMPLES, imported
from trilith.checkpoints import describe_module, load
from trilith.cli.app import run
from trilith.parallel_state import BadInput, Layout, ParallelState, initialize
from trilith.testing import assert_layout_invariant, run_parallel
from trilith.training import Step, make_adamw

plain = imported(EXAMPLES / "plain_model.py", "plain_model")


def test_between_the_example_s_decoder_blocks_memory_and_state_travel_together():
    batch, layout = custom.batch(0, samples=4, frames=4, length=4), Layout(pipeline=4)
    differences = assert_layout_invariant(custom.Transcriber, batch, layouts=[layout], loss=custom.loss)
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
    load(tmp_path / "run", ours)
    load(tmp_path / "exported", again)
    given = {name: one for name, one in custom.batch(99).items() if name != "labels"}
    assert torch.allclose(theirs(**given), ours(**given), atol=1e-5)
    assert torch.equal(again(**given), ours(**given))


@pytest.mark.slow
def test_torchrun_takes_any_layout_from_the_command_line(tmp_path):
    def launch(ranks, *arguments):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command = [*launcher, str(EXAMPLES / "custom_model.py"), "train", "--out", str(tmp_path), *arguments]
        how = {"capture_output": True, "text": True, "timeout": 240, "check": True}
        return subprocess.run(command, **how).stdout

    assert "loss" in launch(4, "--tensor", "2", "--pipeline", "2", "--sequence-parallel", "--steps", "3")
    assert "in 2 steps" in launch(2, "--data", "2", "--zero", "3", "--steps", "5")


PAGE = Page.read("docs/your_model.md")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return all of its Python, as a reader would have it in one file."""
    file = tmp_path_factory.mktemp("page") / "my_model_of_the_page.py"
    file.write_text("\n\n".join(PAGE.blocks("python")), encoding="utf-8")
    return imported(file, file.stem)


def call(file, function, *arguments):
    """Call a function of the page, in a process that knows the page by its file."""
    return getattr(imported(file, f"{Path(file).stem}_in_a_rank"), function)(*arguments)


def test_a_loop_of_ones_own_is_short_and_the_page_imports_trilith_and_torch_alone():
    tree = ast.parse("\n".join(PAGE.blocks("python")))
    (loop,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train")
    assert loop.end_lineno - loop.lineno + 1 <= 25
    nodes = [*ast.walk(tree)]
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert {module.partition(".")[0] for module in modules} == {"trilith", "torch"}


def test_the_proof_holds(page):
    differences = page.prove()
    assert differences and max(each.gradients for each in differences.values()) < 1e-10


def test_the_model_trains_and_the_commands_for_it_work(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, file = str(tmp_path / "run"), page.__file__
    first = run_parallel(call, 2, file, "train", Layout(tensor=2), 6, folder)[0]
    second = run_parallel(call, 2, file, "train", Layout.of(data=2, zero=1), 12, folder)[0]
    assert second[-1] < first[0] - 0.05
    for words in PAGE.commands():
        assert run(words) == 0, words
    ours, again = page.Model(), page.Model()
    describe_module(again, names=page.NAMES)
    load("run", ours)
    load("exported", again)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


def test_a_zoo_model_trains_in_the_pages_own_loop_and_goes_on_in_another_layout(tmp_path):
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    file = str(EXAMPLES / "own_loop.py")
    assert "(../examples/own_loop.py)" in PAGE.text
    expected = run_parallel(call, 1, file, "own_loop", Layout(), whole, 6)[0]
    first = run_parallel(call, 2, file, "own_loop", Layout.of(data=2, zero=2), parts, 3)
    then = run_parallel(call, 3, file, "own_loop", Layout(tensor=3), parts, 6)[0]
    losses = [*map(sum, zip(*first, strict=True)), *then]
    assert losses == pytest.approx(expected, rel=1e-4) and len(losses) == 6
    assert run(["verify", parts]) == 0


def test_the_recipe_trains(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (recipe,) = map(tomllib.loads, PAGE.blocks("toml"))
    for name in ("my_model.py", "my_data.py"):
        (tmp_path / name).write_text(Path(page.__file__).read_text())
    for section in ("model", "loss", "data"):
        recipe[section]["module"] = str(tmp_path / recipe[section]["module"])
    train(recipe | {"device": "cpu", "out": str(tmp_path / "run"), "steps": 3})
    first, _, last = losses(tmp_path / "run")
    assert last < first


def test_the_refusals_are_worded_as_shown(page):
    shown = re.search(r"A cut that is not even: `(.*?)`", PAGE.text, re.DOTALL)
    assert shown is not None
    with pytest.raises(BadInput) as caught:
        page.ColumnParallelLinear(16, 16, state=ParallelState.stand_in(Layout(tensor=3)))
    assert str(caught.value) == " ".join(shown[1].split())
    shown = re.search(r"takes no `stage`: `(.*?)`", PAGE.text, re.DOTALL)
    assert shown is not None

    class Deaf(page.Model):
        def forward(self, x=None, *, tokens):
            return super().forward(x, tokens=tokens)

    state = ParallelState.stand_in(Layout(pipeline=2, virtual_stages=2))
    with pytest.raises(BadInput) as caught:
        Step(Deaf(state=state), page.loss, micro_batch=1, schedule="interleaved", state=state)
    assert str(caught.value) == " ".join(shown[1].split())


def test_two_losses_in_turn_train_as_the_page_says(page):
    model = page.Model()
    initialize(model, 0)
    norms = page.alternating(
        model, make_adamw(model, lr=1e-2), [page.loss, page.stated_loss()], map(page.batch, [0] * 12)
    )
    with torch.no_grad():
        total, count = page.loss(model(tokens=page.batch(0)["tokens"]), page.batch(0))
    assert len(norms) == 12 and float(total / count) < 3.5


def test_the_rules_names_exist():
    rooms = ("checkpoints", "layers", "models", "parallel_state", "testing", "training")
    known = {name for room in rooms for name in vars(import_module(f"trilith.{room}"))}
    shown = re.findall(r"`([A-Za-z_]+)\(", PAGE.text)
    shown += re.findall(r"`([a-z]+_tensor|[a-z]+_sequence)`", PAGE.text)
    assert len(shown) > 20 and not {*shown} - known


def test_the_model_is_planned_for_any_number_of_ranks(page):
    layout = Layout.of(tensor=2, data=4, zero=3)
    memory, sent = page.dry_run(layout, rank=3)
    alone, _ = page.dry_run(Layout())
    assert 0 < memory.total < alone.total
    assert {one.axis for one in sent} == {"tensor", "data", "all"}
