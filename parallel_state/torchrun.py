"""Read torchrun's variables: this process's rank, the number of ranks, and where the ranks meet."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .errors import BadInput

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HIGHEST_PORT = 65535
#: No count of ranks and no port has more digits.
_MOST_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Launched:
    """Describe this process among the ranks that torchrun, or a user who set its variables, has started."""

    rank: int
    world: int
    local_rank: int
    host: str
    port: int


def launched() -> Launched | None:
    """Read torchrun's variables; return ``None`` if none of them is set.

    Raises ``BadInput``, naming the variable, for an incomplete set or an impossible value.
    """
    given = [name for name in _NAMES if name in os.environ]
    if not given:
        return None
    if len(given) < len(_NAMES):
        missing = ", ".join(sorted(set(_NAMES) - set(given)))
        expected, found = f"all of {', '.join(_NAMES)}", f"only {', '.join(given)}"
        raise _bad(missing, expected, found)
    world = _number("WORLD_SIZE", 1, None)
    host = os.environ["MASTER_ADDR"]
    if not host.strip():
        raise _bad("MASTER_ADDR", "the host of rank 0", repr(host))
    return Launched(
        rank=_number("RANK", 0, world - 1),
        world=world,
        local_rank=_number("LOCAL_RANK", 0, world - 1) if "LOCAL_RANK" in os.environ else 0,
        host=host,
        port=_number("MASTER_PORT", 1, _HIGHEST_PORT),
    )


def _number(name: str, least: int, most: int | None) -> int:
    text = os.environ[name]
    wide = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    if not wide or int(text) < least or (most is not None and int(text) > most):
        bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise _bad(name, f"a whole number {bounds}", repr(text))
    return int(text)


def _bad(name: str, expected: str, found: str) -> BadInput:
    todo = "Start through torchrun, or unset its variables"
    return BadInput("environment", name, expected=expected, found=found, todo=todo)
