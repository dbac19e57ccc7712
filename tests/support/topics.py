"""Compute what ``trilith plan explain`` shows: the textbook's formulas, each stated once, as text."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from typing import Any

from trilith.cli.app import run


def explained(*words: str) -> Any:
    """Return what the command gives for these words."""
    with redirect_stdout(io.StringIO()) as printed:
        assert run(["plan", "explain", *words, "--json"]) == 0
    return json.loads(printed.getvalue())


def values(topic: str, *flags: str, **numbers: object) -> dict[str, float]:
    """Return the results of a topic by their symbols, with numbers put in by the names of its options."""
    words = [f"--{name.replace('_', '-')}={number}" for name, number in numbers.items()]
    return {step["symbol"]: step["value"] for step in explained(topic, *words, *flags)["steps"]}
