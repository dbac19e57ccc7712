"""docs/your_model.md and its loop: one model in every layout; trained, cut anew, exported, imported."""

import ast
import re
import tomllib
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.pages import Page
from support.refusals import refusal_of
from support.short_runs import losses, train
from support.strangers import EXAMPLES, imported
from trilith.checkpoints import describe_module, load
from trilith.cli.app import run
from trilith.parallel_state import Layout, ParallelState, initialize
from trilith.testing import run_parallel
from trilith.training import Step, make_adamw

PAGE = Page.read("docs/your_model.md")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return all of its Python, as a reader would have it in one file."""
    file = tmp_path_factory.mktemp("page") / "my_model_of_the_page.py"
    file.write_text("\n\n".join(PAGE.blocks("python")), encoding="utf-8")
    return imported(file, file.stem)


def call(file, function, *arguments):
    """Call a function of a file, in a process that knows it by its file."""
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
    value = load_file("exported/model.safetensors")["h.0.v.weight"]  # by the name of the table
    assert torch.equal(value, ours.get_parameter("blocks.0.mix.enter.value.weight"))


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


def shown(beginning):
    """Return the refusal that the page shows behind these words."""
    text = re.search(rf"{beginning}: `(.*?)`", PAGE.text, re.DOTALL)
    assert text is not None
    return " ".join(text[1].split())


def test_the_refusals_are_worded_as_shown(page):
    class Deaf(page.Model):
        def forward(self, x=None, *, tokens):
            return super().forward(x, tokens=tokens)

    def step():
        state = ParallelState.stand_in(Layout(pipeline=2, virtual_stages=2))
        Step(Deaf(state=state), page.loss, micro_batch=1, schedule="interleaved", state=state)

    cut = partial(page.ColumnParallelLinear, 16, 16, state=ParallelState.stand_in(Layout(tensor=3)))
    assert refusal_of(cut) == shown("A cut that is not even")
    assert refusal_of(step) == shown("without `stage`")


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
    modules = [*(f"trilith.{room}" for room in rooms), "torch.distributed.fsdp"]
    known = {name for module in modules for name in vars(import_module(module))}
    shown = re.findall(r"`([A-Za-z_]+)\(", PAGE.text)
    shown += re.findall(r"`([a-z]+_tensor|[a-z]+_sequence)`", PAGE.text)
    assert len(shown) > 20 and not {*shown} - known


def test_the_model_is_planned_for_any_number_of_ranks(page):
    layout = Layout.of(tensor=2, data=4, zero=3)
    memory, sent = page.dry_run(layout, rank=3)
    alone, _ = page.dry_run(Layout())
    assert 0 < memory.total < alone.total
    assert {one.axis for one in sent} == {"tensor", "data", "all"}
