"""Run each test of the simulated device in a process of its own: torch cannot forget the device again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from trilith.testing import run_fresh


@pytest.fixture
def alone() -> Callable[..., None]:
    """``alone(function, *args)``: call it in a new process, where it must not raise."""

    def run(function: Callable[..., Any], *args: Any) -> None:
        (code,) = run_fresh(function, 1, *args, process_group=False, timeout=300)
        assert code == 0, code.output

    return run
