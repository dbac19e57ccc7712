"""Choose which cases of a long table run in every run: some, by a seed. Nightly all of them run."""

from collections.abc import Collection
from random import Random
from typing import Any

import pytest


def some(cases: Collection[str], count: int, *, always: Collection[str] = (), seed: int = 0) -> list[Any]:
    """Return the cases as parameters; all are slow but ``always`` and so many others."""
    others = sorted(case for case in cases if case not in always)
    chosen = {*always, *Random(seed).sample(others, min(count, len(others)))}
    return [pytest.param(case, marks=[pytest.mark.slow] * (case not in chosen)) for case in cases]
