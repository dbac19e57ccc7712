"""Layouts with all that may be combined with them: each pair of choices; every combination when asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any

import pytest
from trilith.parallel_state import Layout

_SPLITS = {2: (1, 4), 4: (2, 1, 1, 1)}


@dataclass(frozen=True)
class Choice:
    """One run. Choices that mean nothing in a layout are at their first value there."""

    ranks: tuple[int, int, int]  # tensor, pipeline, data
    model: str
    key_value_heads: int = 2
    sequence: bool = False
    zero: int = 0
    schedule: str = "1f1b"
    split: bool = False
    smoothing: float = 0.0
    micro_batch: int = 1
    context: str = ""  # of two ranks: how they get keys and values

    @property
    def layout(self) -> Layout:
        tensor, pipeline, data = self.ranks
        return Layout.of(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            zero=self.zero,
            sequence=self.sequence,
            context=2 if self.context else 1,
            ring=self.context == "ring",
        )

    @property
    def case_model(self) -> str:
        return self.model + "-kv1" * (self.key_value_heads == 1)

    @property
    def legal(self) -> bool:
        tensor, pipeline, data = self.ranks
        return not (
            (self.sequence and tensor == 1)
            or (self.model == "gpt2" and self.key_value_heads != 2)
            or (self.zero and data == 1 and not self.context)
            or (self.context and tensor * pipeline * data > 2)
            or (pipeline == 1 and (self.schedule != "1f1b" or self.split))
            or 4 // data < pipeline * self.micro_batch  # micro-batches of a data rank
        )

    @property
    def cost(self) -> int:
        tensor, pipeline, data = self.ranks
        return 4 * tensor * data * (2 if self.context else 1) + pipeline

    def __str__(self) -> str:
        tensor, pipeline, data = self.ranks
        words = [self.case_model, f"t{tensor}p{pipeline}d{data}"]
        words += [self.schedule] if pipeline > 1 else []
        words += [self.context] * bool(self.context)
        words += ["sequence"] * self.sequence + ["split"] * self.split
        words += [f"zero{self.zero}"] * (data > 1 or self.context != "") + [f"smooth{self.smoothing}"] * bool(
            self.smoothing
        )
        return "-".join([*words, f"micro{self.micro_batch}"])


def all_choices() -> list[Choice]:
    one_axis = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4)]
    values: dict[str, list[Any]] = {
        "ranks": [*one_axis, (2, 2, 1), (2, 1, 2), (1, 2, 2)],
        "model": ["llama", "llama-tied", "gpt2"],
        "key_value_heads": [2, 1],
        "sequence": [False, True],
        "zero": [0, 1, 2, 3],
        "schedule": ["1f1b", "gpipe"],
        "split": [False, True],
        "smoothing": [0.0, 0.1],
        "micro_batch": [1, 2],
        "context": ["", "all-gather", "ring"],
    }
    found = [Choice(**dict(zip(values, one, strict=True))) for one in product(*values.values())]
    return [choice for choice in found if choice.legal]


def pairs(choice: Choice) -> frozenset[tuple[object, ...]]:
    """Every two of its values, each with the name of what was chosen."""
    named = [(f.name, getattr(choice, f.name)) for f in fields(choice)]
    return frozenset(combinations(named, 2))


def plain(choice: Choice) -> bool:
    """Whether it only chooses a layout and a model, as ``test_layouts.py`` does."""
    return choice == Choice(choice.ranks, choice.model)


def covering(choices: list[Choice]) -> list[Choice]:
    """What adds to the plain ones every pair of values of a legal choice: greedily, the cheap ones first."""
    held = {choice: pairs(choice) for choice in sorted(choices, key=lambda choice: choice.cost)}
    missing = set().union(*held.values())
    missing = missing.difference(*(held[choice] for choice in choices if plain(choice)))
    found = []
    while missing:
        best = max(held, key=lambda choice: len(missing & held[choice]))
        found.append(best)
        missing -= held[best]
    return found


ALL = all_choices()
COVERING = covering(ALL)


def test_the_covering_set_is_small_and_covers_every_pair() -> None:
    assert len(COVERING) <= 40
    run = [choice for choice in ALL if plain(choice) or choice in COVERING]
    assert {pair for choice in ALL for pair in pairs(choice)} == {
        pair for choice in run for pair in pairs(choice)
    }


def run(choice: Choice, assert_same: Callable[..., None]) -> None:
    split = _SPLITS[choice.ranks[1]] if choice.split else None
    assert_same(
        choice.case_model,
        choice.layout,
        split=split,
        schedule=choice.schedule,
        label_smoothing=choice.smoothing,
        micro_batch=choice.micro_batch,
    )


@pytest.mark.parametrize("choice", COVERING, ids=str)
def test_every_pair_of_choices_equals_one_device(choice: Choice, assert_same: Callable[..., None]) -> None:
    run(choice, assert_same)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", [choice for choice in ALL if not plain(choice) and choice not in COVERING], ids=str
)
def test_every_combination_equals_one_device(choice: Choice, assert_same: Callable[..., None]) -> None:
    run(choice, assert_same)
