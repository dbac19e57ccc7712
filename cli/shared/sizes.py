"""Parse and print numbers as people write them: amounts, amounts of bytes, and blocks of stages."""

import re

from ...system import whole_number
from ...system.errors import BadInput

_UNITS = {
    "": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}

#: No machine has more memory. Unit: bytes.
LARGEST = 2**60


def parse_size(text: str, option: str) -> int:
    """Parse ``800MB``, ``1.5GiB`` or ``1000000`` to bytes; otherwise ``BadInput`` names ``option``."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)", text.strip())
    units = {unit.lower(): size for unit, size in _UNITS.items()} | {"b": 1}
    if match is None or match[2].lower() not in units:
        raise BadInput(option, expected="a size such as 800MB or 2GiB", found=_short(text))
    size = int(float(match[1]) * units[match[2].lower()])
    if not 1 <= size <= LARGEST:
        raise BadInput(option, expected="from 1 byte to 1 EiB", found=_short(text))
    return size


#: How people write large numbers: 70B parameters, 15T tokens.
_POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_amount(text: str, option: str, *, least: float = 1e-12) -> float:
    """Parse ``70B``, ``15T``, ``989e12`` or ``0.4`` to a number; otherwise ``BadInput`` names ``option``."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,2})?)([KMBT]?)", text.strip())
    number = float(match[1]) * _POWERS[match[2]] if match else -1.0
    if not least <= number <= 1e30:
        expected = f"a number from {least:g} to 1e30, such as 0.4, 989e12, 70B or 15T"
        raise BadInput(option, expected=expected, found=_short(text))
    return number


def parse_counts(split: str | None, where: str, option: str = "--split") -> list[int] | None:
    """Parse whole numbers such as ``3,2``; for anything else ``BadInput`` names ``option``."""
    if split is None:
        return None
    numbers = [number for word in split.split(",") if (number := whole_number(word.strip())) is not None]
    if len(numbers) != split.count(",") + 1:
        raise BadInput(where, option, expected="numbers such as 3,2", found=_short(split))
    return numbers


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}…"
