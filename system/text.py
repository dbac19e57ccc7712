"""Write counts, and read and show text that somebody else wrote: numbers, and what would command a terminal.

Names of files and tensors, values of recipes, and generated text may hold characters that move the cursor,
rename the window or turn the reading direction. Each becomes its escape, such as ``\\x1b``.
"""

import re

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


#: Digits of the longest number that is read: below 2^63, and no program writes more.
_MOST_DIGITS = 18


def whole_number(text: str) -> int | None:
    """Return the number of a text of up to 18 ASCII digits; ``None`` for any other text.

    ``int`` alone takes other scripts' digits and underscores, and raises for thousands of digits;
    ``str.isdigit`` also takes ``"²"``, which ``int`` refuses.
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def counted(number: int, noun: str) -> str:
    """Return a number and the noun, in the plural unless it is one: ``1 file``, ``2,000 entries``."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"
