"""See what this process does: which files it opens, which programs it starts, which pickles it reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def audited(*names: str) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """Collect the events of Python's audit with these names, and their arguments, during the block."""
    events: list[tuple[str, tuple[Any, ...]]] = []
    active = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:  # which stays until the process ends
        if active and event in names:
            events.append((event, arguments))

    sys.addaudithook(hook)
    try:
        yield events
    finally:
        active = False
