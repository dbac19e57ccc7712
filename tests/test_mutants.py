"""The seeded faults still fit the code: the place of each is there, once, and so are its tests."""

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
def test_a_seeded_fault_fits_the_code(mutant):
    file, text = mutants.seed(mutant)
    compile(text, file, "exec")
    path, _, test = mutant.tests.split()[-1].partition("::")
    name, text = test.partition("[")[0], (HERE.parent / path).read_text()
    assert f"def {name}" in text or f"\n{name} = " in text


def test_each_fault_names_a_test_or_chooses_rows():
    assert [mutant.name for mutant in mutants.MUTANTS if mutants.vague(mutant)] == []
    tried = mutants.MUTANTS[0]
    for tests in ("tests/a.py", "tests/a.py::test_b tests/a.py::test_c"):
        assert mutants.vague(tried._replace(tests=tests))
    for tests in ("tests/a.py::test_b", "-kword tests/a.py"):
        assert not mutants.vague(tried._replace(tests=tests))


def test_a_fault_whose_place_is_gone_is_an_error():
    gone = mutants.MUTANTS[0]._replace(old="no_such_name()")
    with pytest.raises(LookupError, match="0 times, expected once"):
        mutants.seed(gone)


def test_parts_of_the_faults_are_all_of_them_once():
    parts = [mutants.MUTANTS[part::4] for part in range(4)]
    assert sorted(sum(parts, ())) == sorted(mutants.MUTANTS)
