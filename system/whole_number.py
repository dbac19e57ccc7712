"""Read a whole number that somebody else wrote."""

#: Digits of the longest number that is read: below 2^63, and no program writes more.
_MOST_DIGITS = 18


def whole_number(text: str) -> int | None:
    """Return the number of a text of up to 18 ASCII digits; ``None`` for any other text.

    ``int`` alone takes other scripts' digits and underscores, and raises for thousands of digits;
    ``str.isdigit`` also takes ``"²"``, which ``int`` refuses.
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None
