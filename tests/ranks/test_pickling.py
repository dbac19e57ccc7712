"""Check that objects arrive unchanged between the parent and its ranks."""

import pickle
import sys
from functools import partial

from support.configs import TINIEST_LLAMA
from trilith.ranks.pickling import FunctionName
from trilith.testing import run_parallel

NAME = "folder_of_nobody.deep.test_it"
SOURCE = """
class Kept:
    def __eq__(self, other):
        return isinstance(other, Kept)

def make():
    return Kept()
"""


def test_a_file_in_folders_that_nobody_can_import_is_loaded_under_its_whole_name(tmp_path, request):
    """pytest names test files so; without the packages above it pickle would find nothing in the module."""
    for parts in (1, 2, 3):
        request.addfinalizer(partial(sys.modules.pop, ".".join(NAME.split(".")[:parts]), None))
    file = tmp_path / "test_it.py"
    file.write_text(SOURCE)
    make = FunctionName(NAME, str(file), "make").load()
    assert pickle.loads(pickle.dumps(make())) == make()
    assert pickle.loads(pickle.dumps(make)) is make


def call(function, times):
    assert callable(function)
    return [function() for _ in range(times)]


def give():
    return dict(TINIEST_LLAMA)


def test_functions_of_a_test_file_travel_as_arguments():
    assert run_parallel(call, 2, give, 2) == [[TINIEST_LLAMA] * 2] * 2
