"""Say which transformers is installed, for tests of what an older one that is allowed has not."""

from importlib.metadata import version

import pytest
from trilith.models.from_transformers.config import proved


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


#: For tests of what only the transformers has with which its own models were proved.
of_proved_transformers = pytest.mark.skipif(
    _numbers(version("transformers")) < _numbers(proved()["transformers"]),
    reason=f"needs transformers {proved()['transformers']}",
)
