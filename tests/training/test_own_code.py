"""A Python file of the user's own runs as Python runs it, hides no other module, and cannot end a command."""

import importlib.util
import sys

import pytest
from support.refusals import Refused, refusals
from trilith.data.items import ItemBatches
from trilith.training.own_code import call_own, own_code


@pytest.fixture
def imported(tmp_path):
    """Remove the modules that the user's files leave in the process."""
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_annotations_are_what_the_file_says(tmp_path, imported):
    file = write(tmp_path, "annotated.py", "class Options:\n    width: int = 3\n")
    assert own_code(f"{file}:Options", "model.module").entry.__annotations__ == {"width": int}


@pytest.mark.parametrize("name", ["calendar", "filelock", "trilith"])
def test_a_file_hides_no_installed_module_of_its_name(name, tmp_path, imported, monkeypatch):
    """Of the standard library or installed; imported before it, or later."""
    for late in (False, True):
        if late:
            monkeypatch.delitem(sys.modules, name)
        file = write(tmp_path / str(late), f"{name}.py", f"import {name}\nentry = {name}\nhere = __name__\n")
        there = own_code(f"{file}:entry", "data.module").entry
        assert there.__spec__.origin != str(file) and not hasattr(there, "here")
        assert importlib.util.find_spec(name).origin == there.__spec__.origin
        assert own_code(f"{file}:here", "data.module").entry in sys.modules
        if name == "trilith":  # loaded once, and never from anew
            return


@pytest.mark.parametrize("name", ["of_mine", "of.mine", "of-mine"])
def test_a_file_of_another_name_is_found_under_it(name, tmp_path, imported):
    file = write(tmp_path, f"{name}.py", "class Net:\n    pass\n")
    kind = own_code(f"{file}:Net", "model.module").entry
    spec = importlib.util.find_spec(kind.__module__)
    assert spec is not None and spec.origin == str(file)
    if name == "of_mine":
        neighbour = write(tmp_path, "neighbour.py", "import of_mine\n")
        assert own_code(f"{neighbour}:of_mine", "loss.module").entry.Net is kind


def test_a_file_runs_once_and_again_when_its_bytes_have_changed(tmp_path, imported):
    file = write(tmp_path, "changing.py", "entry = ['first']\n")
    first = own_code(f"{file}:entry", "loss.module")
    assert own_code(f"{file}:entry", "loss.module").entry is first.entry
    write(tmp_path, "changing.py", "entry = ['second']\n")
    second = own_code(f"{file}:entry", "loss.module")
    assert second.entry == ["second"] and second.digest != first.digest


def make(file):
    call_own(own_code(f"{file}:Data", "data.module"), {}, "data.arguments", within="data.module")


def items(file):
    ItemBatches([(own_code(f"{file}:Data", "data.module").entry(), "")], None, 1, 1, 0)


def ended(why, says, ask, body):
    def given(folder):
        write(folder, "ends.py", f"from argparse import ArgumentParser\nimport sys\n{body}")

    return Refused(why, lambda folder: ask(folder / "ends.py"), says, given=given)


ITEM = "class Data:\n    def __len__(self): return 4\n    def __getitem__(self, number): "
FOUND = "item 0: expected an item, found "
test_a_file_that_ends_the_process_is_refused = refusals(
    ended("at once", r"data.module: expected a file .* SystemExit: 3 \(.*ends.py:3\)", make, "sys.exit(3)\n"),
    ended("by a parser", r"SystemExit: 2 \(.*ends.py:3\)", make,
          "ArgumentParser().parse_args(['--no-such'])\n"),
    ended("in a constructor", r"one that can be made with .* SystemExit: no data \(.*ends.py:4\)", make,
          "class Data:\n    def __init__(self): sys.exit('no data')\n"),
    ended("in an item", FOUND + r"SystemExit: 4 \(.*ends.py:5\)", items, f"{ITEM}sys.exit(4)\n"),
    ended("with an error in an item, whose place is shown", FOUND + r"KeyError: 0 \(.*ends.py:5\)", items,
          f"{ITEM}return {{}}[number]\n"),
)  # fmt: skip
