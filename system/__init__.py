"""Floor 0: what the operating system refuses, and what a user does about it. Needs no other package."""

from .limits import OverLimit, bounded
from .refusals import Refusal, refusal_of
from .visible import visible

__all__ = ["OverLimit", "Refusal", "bounded", "refusal_of", "visible"]
