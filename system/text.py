"""Write counts, and read and show text that somebody else wrote: numbers, and what would command a terminal.

Names of files and tensors, values of recipes, and generated text may hold characters that move the cursor,
rename the window or turn the reading direction. Each becomes its escape, such as ``\\x1b``.
"""

import re
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

#: Where our modules lie.
_PACKAGE = Path(__file__).resolve().parents[1]
_format_with_code = warnings.formatwarning
#: C0 without tab and line feed, delete, C1, the line and paragraph separators, what turns the direction, and
#: halves of surrogate pairs, which no terminal takes.
_COMMANDS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"
    r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return the text with all that a terminal would obey written out, but for tabs and line ends."""
    return _COMMANDS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def literal(value: object, most: int = 80) -> str:
    """Return the beginning of a value as a recipe and a ``config.json`` spell it, but a text as Python does.

    >>> literal({"qk_norm": True, "window": None, "sizes": (4, 'a')})
    "{'qk_norm': true, 'window': null, 'sizes': [4, 'a']}"
    """
    match value:
        case _ if most <= 0:
            text = ""  # an entry so deep within others that nothing of it would be seen
        case bool():
            text = str(value).lower()
        case None:
            text = "null"
        case list() | tuple():
            text = f"[{', '.join(literal(entry, most - 1) for entry in value[:most])}]"
        case dict():
            entries = islice(value.items(), most)
            text = f"{{{', '.join(f'{key!r}: {literal(entry, most - 1)}' for key, entry in entries)}}}"
        case _:
            text = repr(value)
    return text[:most]


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Format a warning of ours as one line for users; one of a library as Python does, with its code.

    It stands in for ``warnings.formatwarning``.
    """
    file = Path(filename).resolve()
    if not file.is_relative_to(_PACKAGE) or "site-packages" in file.relative_to(_PACKAGE).parts:
        return _format_with_code(message, category, filename, lineno, line)
    return f"warning: {' '.join(visible(str(message)).split())}\n"


#: Digits of the longest number that is read: below 2^63, and no program writes more.
_MOST_DIGITS = 18


def whole_number(text: str) -> int | None:
    """Return the number of a text of up to 18 ASCII digits; ``None`` for any other text.

    ``int`` alone takes other scripts' digits and underscores, and raises for thousands of digits;
    ``str.isdigit`` also takes ``"²"``, which ``int`` refuses.
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def nearest_names(
    word: str, names: Iterable[str], *, most: int = 3, cutoff: float = 0.6, prefix: str = "", also: str = ""
) -> str:
    """Return the hint to use those names that are most like a word, each behind ``prefix``, and ``also``."""
    near = ", ".join(prefix + name for name in get_close_matches(word, [*names], most, cutoff))
    return "; ".join(filter(None, (near and f"Nearest: {near}", also)))


def counted(number: int, noun: str) -> str:
    """Return a number and the noun, in the plural unless it is one: ``1 file``, ``2,000 entries``."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"
