"""Let tests import the helpers beside them: pytest imports each test file alone."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def made():
    """A folder with ``hf`` and every other form of the same weights; tests do not write into it."""
    from forms import made_once

    return made_once()
