"""Read the table of what ``trilith plan explain`` explains."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Input(NamedTuple):
    """Name a number that is put in: symbol, option, default as it is written, and meaning."""

    symbol: str
    option: str
    default: str
    meaning: str


class Result(NamedTuple):
    """State how a result is computed. The texts have ``{}`` for ``str.format``."""

    symbol: str
    formula: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Topic:
    """Hold a topic of ``topics.toml``, whose head says what each key is."""

    title: str
    help: str
    inputs: list[Input]
    steps: list[Result]
    notes: list[str]
    sources: list[str]
    examples: list[str]
    choices: Mapping[str, Any] = field(default_factory=dict)
    of_model: Mapping[str, str] = field(default_factory=dict)


@cache
def read_table() -> tuple[Mapping[str, tuple[str, str]], Mapping[str, Topic]]:
    """Return kind and meaning of each option that is a number, and the topics by name."""
    table = tomllib.loads(Path(__file__).with_name("topics.toml").read_text(encoding="utf-8"))
    options = {name: (kind, meaning) for name, (kind, meaning) in table["options"].items()}
    topics = {}
    for name, raw in table["topics"].items():
        inputs = [[*fields, options[fields[1]][1]][:4] for fields in _rows(raw["inputs"])]
        steps = [Result(*fields) for fields in _rows(raw["steps"])]
        topics[name] = Topic(**raw | {"inputs": [Input(*fields) for fields in inputs], "steps": steps})
    return options, topics


def _rows(text: str) -> list[list[str]]:
    """Return the fields of each line: two blanks or more are between them."""
    return [re.split(r" {2,}", line.strip(), maxsplit=3) for line in text.splitlines()]
