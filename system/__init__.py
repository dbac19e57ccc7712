"""Floor 0: the operating system and the limits of work; no torch."""

from .at_once import most_at_once
from .limits import OverLimit, bounded
from .refusals import Refusal, refusal_of
from .visible import visible

__all__ = [
    "OverLimit",
    "Refusal",
    "bounded",
    "most_at_once",
    "refusal_of",
    "visible",
]
