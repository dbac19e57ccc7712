"""Write a number of things in words."""


def counted(number: int, noun: str) -> str:
    """Return a number and the noun, in the plural unless it is one: ``1 file``, ``2,000 entries``."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"
