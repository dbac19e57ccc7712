"""transformers' list of its models' modules is made once, and is the one that it would make."""

import subprocess
import sys

PROGRAM = """
import transformers
from transformers.utils import import_utils
from trilith.system.transformers_models import import_models
lists, make = [], import_utils.create_import_structure_from_path
import_utils.create_import_structure_from_path = lambda path: lists.append(path) or make(path)
import_models()
from transformers import models
assert not lists, lists
import_utils.create_import_structure_from_path = make
import_utils.define_import_structure.cache_clear()
known = import_utils.define_import_structure(models.__file__)
usual = import_utils._LazyModule("usual", models.__file__, known)
for name in ("_modules", "_class_to_module", "_object_missing_backend"):
    assert getattr(models, name) == getattr(usual, name), name
assert sorted(models.__all__) == sorted(usual.__all__)
assert len(usual._class_to_module) > 1000
assert models.llama.modeling_llama.LlamaModel is transformers.LlamaModel
"""


def test_the_models_of_transformers_are_listed_once():
    """A class of several modules is that of the last in a set, whose order is another in each process."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
