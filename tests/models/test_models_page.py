"""docs/models.md has a row for every family, and what tests measured in it."""

import re
from pathlib import Path

import trilith
from support.models_page import COLUMNS, NOT_MEASURED, cells_of, page
from trilith.models import FAMILIES

PAGE = Path(trilith.__path__[0]) / "docs" / "models.md"
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
