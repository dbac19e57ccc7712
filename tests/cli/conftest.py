"""Inputs and folders for tests that try every command."""

import importlib
import shutil
import tempfile
from pathlib import Path

import pytest
import trilith
from support.command_lines import make_inputs
from trilith.cli.app import run


@pytest.fixture(scope="module")
def inputs():
    """A folder with one good input of each kind, and every module of the house imported."""
    root = Path(trilith.__path__[0])
    for file in sorted(root.glob("*/*.py")):
        ours = file.parent.name != "tests" and (file.parent / "__init__.py").exists()
        if ours and file.name != "__main__.py":
            importlib.import_module(f"trilith.{file.parent.name}.{file.stem}".removesuffix(".__init__"))
    folder = Path(tempfile.mkdtemp(prefix="trilith-faults-"))
    folder.chmod(0o755)
    make_inputs(folder)
    run(["--help"])  # what it reads and imports, forks need not read again
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def folder():
    """Make folders for trials, each with one for temporary files; every user may work there."""
    with tempfile.TemporaryDirectory(prefix="trilith-trials-") as root:
        Path(root).chmod(0o777)

        def make():
            where = Path(tempfile.mkdtemp(dir=root))
            (where / "tmp").mkdir()
            for each in (where, where / "tmp"):
                each.chmod(0o777)
            return where

        yield make
