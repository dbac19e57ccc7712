"""The seeded faults still fit the code: each replaces text that is there once, and names tests that exist."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SPEC = importlib.util.spec_from_file_location("trilith_mutants", HERE / "mutants.py")
assert SPEC is not None and SPEC.loader is not None
mutants = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = mutants
SPEC.loader.exec_module(mutants)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_seeded_fault_fits_the_code(mutant: object) -> None:
    text = (HERE.parent / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (HERE.parent / file).read_text()
