"""Floor 0: what the operating system refuses, and what a user does about it. Needs no other package."""

from .at_once import most_at_once
from .limits import OverLimit, bounded
from .refusals import Refusal, refusal_of
from .visible import visible

__all__ = ["OverLimit", "Refusal", "bounded", "most_at_once", "refusal_of", "visible"]
