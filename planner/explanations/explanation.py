"""Hold a calculation as text that a reader can redo: each line is plain arithmetic over named numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import isfinite, log10


@dataclass(frozen=True, slots=True)
class Given:
    """State a number that is put in, under the symbol that formulas use; ``option`` sets it."""

    symbol: str
    value: float
    meaning: str
    option: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """State one result. ``formula`` is Python arithmetic over symbols; ``numbers`` is the same with numbers.

    ``value`` is what the function of ``planner.formulas`` returns. Its unit is bytes, s, FLOPs, share, or
    another word.
    """

    symbol: str
    meaning: str
    formula: str
    numbers: str
    value: float
    unit: str


#: Meaning and option of each symbol that stands for the same in every explanation that has it.
_USUAL = {
    "L": ("blocks", "--layers"),
    "D": ("hidden size", "--hidden"),
    "N": ("tokens of a micro-batch on a rank", "--tokens"),
    "S": ("tokens of a row", "--sequence"),
    "b": ("rows of a micro-batch", "--micro-batch"),
    "t": ("tensor ranks", "--tensor"),
    "p": ("pipeline ranks", "--pipeline"),
    "G": ("GPUs", "--gpus"),
    "F": ("FLOP/s of a GPU at its peak, dense bf16", "--peak"),
}


@dataclass(slots=True)
class Explanation:
    """Collect the given numbers and the steps; a step's symbol may stand in the formulas after it."""

    title: str
    given: list[Given] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def put_in(self, symbol: str, value: float, meaning: str, option: str = "") -> None:
        """Add a given number."""
        self.given.append(Given(symbol, value, meaning, option))

    def put_in_usual(self, **values: float) -> None:
        """Add given numbers that mean the same in many explanations, by their symbols."""
        for symbol, value in values.items():
            self.put_in(symbol, value, *_USUAL[symbol])

    def put_in_link(self, number_bytes: float, bandwidth: float) -> None:
        """Add the size of a number, ``w``, and the rate of the link, ``W``."""
        self.put_in("w", number_bytes, "bytes of a number", "--number-bytes")
        self.put_in("W", bandwidth, "bytes a second that a rank can send over the link", "--bandwidth")

    def over_link(self, symbol: str, size: float, bandwidth: float) -> None:
        """Add the seconds that the bytes of ``symbol`` take."""
        meaning = "for them, if nothing else is computed meanwhile"
        self.step("seconds", f"{symbol} / W", size / bandwidth, "s", meaning)

    def step(self, symbol: str, formula: str, value: float, unit: str, meaning: str) -> None:
        """Add a result, and write its formula again with the numbers in place of the symbols."""
        known = {one.symbol: one.value for one in self.given}
        known |= {one.symbol: one.value for one in self.steps}
        numbers = re.sub(r"(?<![\w.])[A-Za-z_]\w*", lambda word: _number(known, word[0]), formula)
        self.steps.append(Step(symbol, meaning, formula, numbers, value, unit))

    def __getitem__(self, symbol: str) -> float:
        """Return the value of a step."""
        return next(one.value for one in self.steps if one.symbol == symbol)


#: Functions that may stand in a formula.
FUNCTIONS = ("ceil", "log2", "max")


def _number(known: dict[str, float], word: str) -> str:
    return word if word in FUNCTIONS else plain(known[word])


def plain(value: float) -> str:
    """Write a number with nine digits as Python reads it: ``140e9`` for 140,000,000,000."""
    if not isfinite(value):
        return str(value)
    exponent = int(log10(abs(value)) // 3 * 3) if value else 0
    if -3 <= exponent <= 3:
        return f"{value:.9g}"
    return f"{value / 10**exponent:.9g}e{exponent}"


#: Letters that stand for powers of ten in front of a unit.
_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def readable(value: float, unit: str) -> str:
    """Write a result with its unit, as one would say it: ``140 GB``, ``15.8 %``, ``22.3 s``."""
    if unit == "share":
        return f"{100 * value:.3g} %"
    if unit == "s" and 0 < value < 1:
        return f"{1e3 * value:.4g} ms" if value >= 1e-3 else f"{1e6 * value:.4g} us"
    if unit == "bytes":
        size, letter = next(((size, letter) for size, letter in _SCALES if value >= size), (1.0, ""))
        return f"{value / size:.4g} {letter}B"
    if value >= 1e15:
        return f"{value:.4g} {unit}"
    if value >= 1e4 or value == int(value):
        return f"{value:,.0f} {unit}"
    return f"{value:,.1f} {unit}" if value >= 1e3 else f"{value:.4g} {unit}"
