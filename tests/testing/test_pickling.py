"""Check that objects arrive unchanged between the parent and its ranks."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path

import pytest
from trilith.testing import run_parallel
from trilith.testing.ranks.pickling import FunctionName
from trilith.testing.tiny_models import TINIEST_LLAMA

NAME = "folder_of_nobody.deep.test_it"
SOURCE = """
class Kept:
    def __eq__(self, other):
        return isinstance(other, Kept)

def make():
    return Kept()
"""


def test_a_file_in_folders_that_nobody_can_import_is_loaded_under_its_whole_name(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """pytest names test files so; without the packages above it pickle would find nothing in the module."""
    for parts in (1, 2, 3):
        request.addfinalizer(partial(sys.modules.pop, ".".join(NAME.split(".")[:parts]), None))
    file = tmp_path / "test_it.py"
    file.write_text(SOURCE)
    make = FunctionName(NAME, str(file), "make").load()
    assert pickle.loads(pickle.dumps(make())) == make()
    assert pickle.loads(pickle.dumps(make)) is make


def call(function: object, times: int) -> object:
    assert callable(function)
    return [function() for _ in range(times)]


def give() -> dict[str, object]:
    return dict(TINIEST_LLAMA)


def test_functions_of_a_test_file_travel_as_arguments() -> None:
    assert run_parallel(call, 2, give, 2) == [[TINIEST_LLAMA] * 2] * 2
