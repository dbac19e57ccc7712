"""How many examples a test draws: all of them with the slow tests, the first of them in the default suite."""

from __future__ import annotations

from hypothesis import settings

#: The profile of hypothesis in which everything is drawn (see ``conftest.py``).
ALL = "all"
_SHARE = 4


def drawn(most: int) -> int:
    """Return ``most`` where the slow tests run too, else a quarter of it."""
    return most if settings.get_current_profile_name() == ALL else -(-most // _SHARE)
