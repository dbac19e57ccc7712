"""Let tests import the helpers beside them: pytest imports each test file alone."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A folder with ``hf`` and every other form of the same weights; tests do not write into it."""
    from forms import write_forms

    return write_forms(tmp_path_factory.mktemp("foreign"))
