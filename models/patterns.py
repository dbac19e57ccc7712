"""Match names against a user's regular expression, which may be one that never comes to an end.

Python's ``re`` tries every way to read a text: of ``(a+)+$`` there are 2 to the power of its length. So each
pattern has a limit on the time that all its searches take together.
"""

import re
import time
from functools import lru_cache
from typing import Literal

from ..parallel_state import BadInput
from ..system import OverLimit, bounded, literal

#: Characters of a pattern, and seconds of processor time for all its searches: a usual one takes
#: microseconds.
LONGEST, PATIENCE = 4096, 5.0
#: Searches that take less are not counted: no number of ordinary ones uses the time up. Unit: seconds.
_ORDINARY = 1e-3


class Pattern:
    """A compiled pattern and the time that is left to it."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self._left = pattern, PATIENCE
        if len(pattern) > LONGEST:
            raise re.error(f"longer than {LONGEST} characters")
        try:
            with bounded(seconds=PATIENCE):
                self._compiled = re.compile(pattern)
        except (RecursionError, OverflowError, OverLimit) as error:
            raise re.error(f"too deeply nested or too large ({type(error).__name__})") from None

    def find(self, how: Literal["search", "match", "fullmatch"], name: str) -> re.Match[str] | None:
        """Return what ``re`` finds. ``BadInput`` where that takes too long."""
        began = time.thread_time()
        try:
            if self._left <= 0:
                raise OverLimit
            with bounded(seconds=self._left):
                match: re.Match[str] | None = getattr(self._compiled, how)(name)
        except OverLimit:
            self._left = 0.0
            shown = self.pattern if len(self.pattern) <= 80 else f"{self.pattern[:80]}…"
            raise BadInput(
                "pattern",
                literal(shown),
                expected=f"a regular expression that is decided within {PATIENCE:g} s over all names",
                found=f"one that takes longer on {name[:80]!r}",
                todo="Avoid a repetition inside a repetition, such as (a+)+",
            ) from None
        spent = time.thread_time() - began
        if spent > _ORDINARY:
            self._left -= spent
        return match


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> Pattern:
    """Compile a pattern, once. ``re.error`` for one that is none."""
    return Pattern(pattern)


def checked(pattern: str, where: object, key: str, expected: str = "a regular expression") -> Pattern:
    """Compile a pattern that a user states. ``BadInput`` for one that is none."""
    try:
        return compiled(pattern)
    except re.error as error:
        raise BadInput(where, key, expected=expected, found=f"{pattern[:80]!r}: {error}") from None
