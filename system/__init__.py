"""Floor 0: what the operating system refuses, and what a user does about it. Needs no other package."""

from .refusals import Refusal, refusal_of

__all__ = ["Refusal", "refusal_of"]
