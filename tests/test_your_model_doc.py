"""docs/your_model.md, followed from top to bottom: its code is one file, its commands are run."""

import importlib.util
import re
import sys

import pytest
import torch
from support.pages import Page
from trilith.checkpoints import load_module
from trilith.cli.app import run
from trilith.parallel_state import BadInput, Layout, ParallelState, initialize
from trilith.testing import run_parallel
from trilith.training import ModuleStep

PAGE = Page.read("docs/your_model.md")


def load(file, name):
    """Import the page's Python from a file."""
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return all of its Python, as a reader would have it in one file."""
    file = tmp_path_factory.mktemp("page") / "my_model_of_the_page.py"
    file.write_text("\n\n".join(PAGE.blocks("python")), encoding="utf-8")
    return load(file, file.stem)


def call(file, function, *arguments):
    """Call a function of the page, in a process that knows the page by its file."""
    return getattr(load(file, "page_in_a_rank"), function)(*arguments)


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
    load_module("run", ours)
    load_module("exported", again, names=page.NAMES)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


def test_a_zoo_model_trains_in_the_pages_own_loop_and_goes_on_in_another_layout(page, tmp_path):
    whole, parts, file = str(tmp_path / "whole"), str(tmp_path / "parts"), page.__file__
    expected = run_parallel(call, 1, file, "own_loop", Layout(), whole, 6)[0]
    first = run_parallel(call, 2, file, "own_loop", Layout.of(data=2, zero=2), parts, 3)
    then = run_parallel(call, 3, file, "own_loop", Layout(tensor=3), parts, 6)[0]
    losses = [*map(sum, zip(*first, strict=True)), *then]
    assert losses == pytest.approx(expected, rel=1e-4) and len(losses) == 6
    assert run(["verify", parts]) == 0


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
        ModuleStep(Deaf(state=state), page.loss, micro_batch=1, schedule="interleaved", state=state)
    assert str(caught.value) == " ".join(shown[1].split())


def test_the_rules_names_exist(page):
    import trilith.layers
    import trilith.models
    import trilith.parallel_state

    known = {name for room in (trilith.layers, trilith.models, trilith.parallel_state) for name in vars(room)}
    shown = set(re.findall(r"`([A-Za-z_]+)\(", PAGE.text)) | set(
        re.findall(r"`([a-z]+_tensor|[a-z]+_sequence)`", PAGE.text)
    )
    assert shown - known <= {"assert_layout_invariant", "load_module", "Model", "Precision"}
    initialize(page.Model(), 0)


def test_the_model_is_planned_for_any_number_of_ranks(page):
    layout = Layout.of(tensor=2, data=4, zero=3)
    memory, sent = page.dry_run(layout, rank=3)
    alone, _ = page.dry_run(Layout())
    assert 0 < memory.total < alone.total
    assert {one.axis for one in sent} == {"tensor", "data", "all"}
