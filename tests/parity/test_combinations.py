"""Layouts with all that may be combined with them: each pair of choices.

More choices at once are drawn in ``test_drawn_layouts.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest
from trilith.parallel_state import Layout
from trilith.pipeline import SCHEDULE_NAMES, schedule_kind

SAMPLES = 8
_SPLITS = {2: (1, 4), 4: (2, 1, 1, 1)}


@dataclass(frozen=True)
class Choice:
    """One run. Choices that mean nothing in a layout are at their first value there."""

    ranks: tuple[int, int, int]  # tensor, pipeline, data
    model: str
    key_value_heads: int = 2
    sequence: bool = False
    zero: tuple[int, int] = (
        0,
        1,
    )  # its stage, replicas of the shards: one choice, for each with each schedule
    schedule: str = "1f1b"
    split: bool = False
    smoothing: float = 0.0
    micro_batch: int = 1
    context: str = ""  # of two ranks: how they get keys and values
    trains: str = "all"  # or "frozen", all but one block, or "lora"

    @property
    def layout(self) -> Layout:
        (tensor, pipeline, data), (zero, replicas) = self.ranks, self.zero
        kind = schedule_kind(self.schedule)
        return Layout.of(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            data_replicate=replicas,
            zero=zero,
            sequence=self.sequence,
            context=2 if self.context else 1,
            ring=self.context == "ring",
            virtual_stages=kind.virtual_stages if pipeline > 1 else 1,
            v_shape=kind.v_shape,
        )

    @property
    def case_model(self) -> str:
        return self.model + "-kv1" * (self.key_value_heads == 1)

    @property
    def legal(self) -> bool:
        (_, pipeline, data), (zero, _) = self.ranks, self.zero
        micro_batches, kind = SAMPLES // data // self.micro_batch, schedule_kind(self.schedule)
        return not (
            (self.model == "gpt2" and self.key_value_heads != 2)
            or (zero and data == 1 and not self.context)
            or pipeline * kind.virtual_stages not in (1, *_SPLITS)
            or not kind.runs(pipeline, micro_batches)
        )

    @property
    def cost(self) -> int:
        tensor, pipeline, data = self.ranks
        return 4 * tensor * data * (2 if self.context else 1) + pipeline

    def __str__(self) -> str:
        (tensor, pipeline, data), (zero, replicas) = self.ranks, self.zero
        words = [self.case_model, f"t{tensor}p{pipeline}d{data}"]
        words += [self.schedule] if pipeline > 1 else []
        words += [self.context] * bool(self.context)
        words += ["sequence"] * self.sequence + ["split"] * self.split
        words += [f"zero{zero}"] * (data > 1 or self.context != "") + [f"replicas{replicas}"] * (replicas > 1)
        words += [f"smooth{self.smoothing}"] * bool(self.smoothing) + [self.trains] * (self.trains != "all")
        return "-".join([*words, f"micro{self.micro_batch}"])


def all_choices() -> list[Choice]:
    one_axis = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4)]
    found = []
    for tensor, pipeline, data in [*one_axis, (2, 2, 1), (2, 1, 2), (1, 2, 2)]:
        shared = [(stage, replicas) for replicas in (1, 2)[:data] for stage in range(1, 4)]
        values: dict[str, list[Any]] = {
            "ranks": [(tensor, pipeline, data)],
            "model": ["llama", "llama-tied", "gpt2"],
            "key_value_heads": [2, 1],
            "sequence": [False, True][:tensor],
            "zero": [(0, 1), *shared],
            "schedule": [*SCHEDULE_NAMES] if pipeline > 1 else ["1f1b"],
            "split": [False, True][:pipeline],
            "smoothing": [0.0, 0.1],
            "micro_batch": [1, 2],
            "context": ["", "all-gather", "ring"] if tensor * pipeline * data <= 2 else [""],
            "trains": ["all", "frozen", "lora"],
        }
        drawn = (Choice(**dict(zip(values, one, strict=True))) for one in product(*values.values()))
        found += [choice for choice in drawn if choice.legal]
    return found


def pairs(choice: Choice) -> frozenset[tuple[object, ...]]:
    """Every two of its values, each with the name of what was chosen."""
    return frozenset(combinations(vars(choice).items(), 2))


def plain(choice: Choice) -> bool:
    """Whether it only chooses a layout and a model, as ``test_layouts.py`` does."""
    return choice == Choice(choice.ranks, choice.model)


def covering(choices: list[Choice]) -> list[Choice]:
    """What adds to the plain ones every pair of values of a legal choice: for the first pair that is missing,
    of some choices that have it the one with the most missing pairs, the cheap ones first.
    """
    held = {choice: pairs(choice) for choice in sorted(choices, key=lambda choice: choice.cost)}
    having: dict[tuple[object, ...], list[Choice]] = {}
    for choice, its in held.items():
        for pair in its:
            having.setdefault(pair, []).append(choice)
    for choice in filter(plain, choices):
        for pair in held[choice]:
            having.pop(pair, None)
    found = []
    while having:
        rarest = min(having.values(), key=len)
        some = rarest[:: max(1, len(rarest) // 60)]
        best = max(some, key=lambda choice: len(having.keys() & held[choice]))
        found.append(best)
        for pair in held[best]:
            having.pop(pair, None)
    return found


ALL = all_choices()
COVERING = covering(ALL)


def test_the_covering_set_is_small_and_covers_every_pair() -> None:
    assert len(COVERING) <= 70
    run = [choice for choice in ALL if plain(choice) or choice in COVERING]
    assert {pair for choice in ALL for pair in pairs(choice)} == {
        pair for choice in run for pair in pairs(choice)
    }


@pytest.mark.parametrize("choice", COVERING, ids=str)
def test_every_pair_of_choices_equals_one_device(choice: Choice, assert_same: Callable[..., None]) -> None:
    stages = choice.layout.stages
    assert_same(
        choice.case_model,
        choice.layout,
        split=_SPLITS[stages] if choice.split else None,
        schedule=choice.schedule,
        label_smoothing=choice.smoothing,
        micro_batch=choice.micro_batch,
        samples=SAMPLES,
        clip=0.05 if choice.trains == "all" else 1e-3,
        frozen=r"^(?!.*(layers|h)\.2\.)" if choice.trains == "frozen" else None,
        lora={"r": 3, "target_modules": "all-linear"} if choice.trains == "lora" else None,
    )
