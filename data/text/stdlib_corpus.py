"""Real text that every machine has: the sources of Python's own standard library."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ...parallel_state import BadInput


def standard_library(limit: int) -> Iterator[str]:
    """Yield the standard library's modules as texts, sorted by name, up to ``limit`` characters in all."""
    root = Path(sysconfig.get_path("stdlib"))
    left = limit
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if left <= 0:
            return
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")[:left]
        except (OSError, UnicodeDecodeError):
            continue
        left -= len(text)
        if text:
            yield text
    if left == limit:
        raise BadInput(
            root, expected="the sources of Python's standard library", found="no readable .py file"
        )


def paragraphs(text: str) -> list[str]:
    """Return the pieces between blank lines, whitespace kept."""
    return [part for part in text.split("\n\n") if part.strip()]
