"""docs/models.md has a row for every family, and what tests measured in it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trilith
from support.models_page import COLUMNS, NOT_MEASURED, axes_of, cells_of, page, with_measured
from trilith.models import FAMILIES
from trilith.parallel_state import Layout

PAGE = Path(trilith.__path__[0]) / "docs" / "models.md"
TESTS = """
import pytest

@pytest.mark.parametrize("difference", [0.5, 2.0])
def test_it(difference, record_property):
    record_property("measured", ["llama", ["tensor"], difference])
    assert difference < 1
"""
NUMBER = re.compile(r"0|\d{1,3}|\de-\d\d")


def test_the_page_has_a_row_for_every_family_and_a_cell_for_every_axis():
    cells = cells_of(PAGE.read_text())
    assert PAGE.read_text() == page(cells), (
        "run `make models FAMILY=...` of a new family, or `python -m support.models_page`"
    )
    assert [*cells] == [*FAMILIES]
    for family, row in cells.items():
        assert [*row] == [*COLUMNS]
        assert [
            one for one in row.values() if one not in ("-", NOT_MEASURED) and not NUMBER.fullmatch(one)
        ] == []
        assert row["compile"] != "-", family


def test_a_measurement_replaces_an_older_one_by_its_largest_difference():
    older = {"llama": {"tensor": "1e-03", "context": "2e-14"}}
    new = [("llama", ["tensor", "ZeRO"], 3.26e-15), ("llama", ["tensor"], 1e-15), ("gpt2", ["generation"], 0)]
    found = cells_of(page(with_measured(older, new)))
    assert found["llama"]["tensor"] == found["llama"]["ZeRO"] == "3e-15"
    assert (found["llama"]["context"], found["llama"]["LoRA"], found["llama"]["expert"]) == (
        "2e-14",
        NOT_MEASURED,
        "-",
    )
    assert found["gpt2"]["generation"] == "0"


def test_a_layout_counts_to_each_of_its_axes():
    assert axes_of(Layout.of(tensor=2, sequence=True, context=2)) == ["tensor", "sequence", "context"]
    assert axes_of(Layout.of(data=2, expert=2, zero=3)) == ["expert", "ZeRO"]
    assert axes_of(Layout.of(pipeline=2, data=2)) == ["pipeline"]


@pytest.mark.slow
def test_tests_of_families_write_what_they_measure(tmp_path):
    """Only a test that passed counts."""
    tests = PAGE.parent.parent / "tests"
    (tmp_path / "conftest.py").write_text((tests / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--measured", "measured.json", "test_it.py"]
    how = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tests)}, "timeout": 100}
    assert subprocess.run(command, capture_output=True, **how).returncode == 1
    assert json.loads((tmp_path / "measured.json").read_text()) == {"measured": [["llama", ["tensor"], 0.5]]}
