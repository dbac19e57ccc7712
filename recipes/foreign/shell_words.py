"""Cut a shell script into statements, words, and the quoted and unquoted parts of a word."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...parallel_state import BadInput

#: ``$NAME``, ``${NAME}``, ``${NAME[@]}``, or with a default such as ``${NAME:-8}``; and ``$((2 * 4))``.
PARAMETER = re.compile(
    r"\$(?:\{([A-Za-z_]\w*|\d+)(\[[@*]\])?(?:(:?[-=+])((?:[^{}]|\{[^{}]*\})*))?\}|([A-Za-z_]\w*|\d))"
)
SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_HERE = re.compile(r"(?<!<)<<(?!<)-?[ \t]*(['\"]?)(\w+)\1")


def statements(text: str, where: str) -> Iterator[list[str]]:
    """Yield the words of each statement, with their quotes; an array is ``NAME=(``, words and ``)``."""
    words: list[str] = []
    word, at, depth = "", 0, 0
    while at < len(text):
        char = text[at]
        if char == "\\" and text[at + 1 : at + 2] in ("\n", "\r"):
            char, at = " ", at + (2 if text[at + 1 : at + 3] == "\r\n" else 1)
        end = at + 1
        if char == "#" and not word:
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
        elif char == "\\":
            word, end = word + text[at : at + 2], at + 2
        elif char in "'\"`" or text.startswith(("${", "$("), at):
            end = _end_of(text, at, where)
            word += text[at:end]
        elif found := _HERE.match(text, at):
            text, end = _without_body(text, found, where), found.end()
        elif char == "(" and word.endswith("="):
            words.append(word + "(")
            word, depth = "", depth + 1
        elif char == ")" and depth:
            words += [word, ")"] if word else [")"]
            word, depth = "", depth - 1
        elif char.isspace() or (char in ";&|" and not depth):
            if word:
                words.append(word)
                word = ""
            condition = words[:1] in (["if"], ["elif"])
            both = text[at : at + 2] if text.startswith(("&&", "||"), at) else ""
            end = at + len(both or char)
            if condition and both:
                words.append(both)
            elif not depth and not (char.isspace() and char != "\n"):
                yield from ([words] if words else [])
                yield from ([[both]] if both else [])
                words = []
        else:
            word += char
        at = end
    if depth:
        raise BadInput(where, expected="a ) for each array", found="the end of the script")
    if word:
        words.append(word)
    if words:
        yield words


def _without_body(text: str, found: re.Match[str], where: str) -> str:
    """Return the script without the lines that follow ``<<END``, up to the line ``END``."""
    begin = text.find("\n", found.end())
    end = re.compile(rf"^\s*{found[2]}$", re.MULTILINE).search(text, begin) if begin >= 0 else None
    if end is None:
        raise BadInput(where, f"<<{found[2]}", expected=f"a line {found[2]}", found="none")
    return text[:begin] + text[end.end() :]


def _end_of(text: str, at: int, where: str) -> int:
    """Return the place behind a quoted text or an expansion that begins here."""
    if text[at] == "$":
        pair, depth = ("{", "}") if text[at + 1] == "{" else ("(", ")"), 0
        for end in range(at + 1, len(text)):
            depth += (text[end] == pair[0]) - (text[end] == pair[1])
            if not depth:
                return end + 1
    else:
        end = at + 1
        while end < len(text):
            if text[end] == text[at]:
                return end + 1
            end += 2 if text[end] == "\\" and text[at] != "'" else 1
    line = text.count("\n", 0, at) + 1
    raise BadInput(where, f"line {line}", expected=f"an end of what begins with {text[at]}", found="none")


def pieces(word: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a word with the quote around each, variables by themselves."""
    at = 0
    while at < len(word):
        char = word[at]
        if char == "'":
            end = word.find("'", at + 1)
            yield word[at + 1 : end], "'"
            at = end + 1
        elif char == '"':
            end = _end_of(word, at, "script")
            inner = re.sub(r"\\\r?\n", "", word[at + 1 : end - 1])
            yield from ((part, '"') for part in _split(re.sub(r'\\(["$`\\])', r"\1", inner)))
            if end == at + 2:
                yield "", '"'
            at = end
        elif char == "\\":
            yield word[at + 1 : at + 2], "'"
            at += 2
        elif word.startswith("${", at):
            end = _end_of(word, at, "script")
            yield word[at:end], ""
            at = end
        else:
            found = re.compile(r"(?:(?!\$\{)[^'\"\\])+").match(word, at)
            assert found is not None
            yield from ((part, "") for part in _split(found[0]))
            at = found.end()


def _split(text: str) -> Iterator[str]:
    at = 0
    for found in re.finditer(f"{SUM.pattern}|{PARAMETER.pattern}", text):
        if found.start() > at:
            yield text[at : found.start()]
        yield found[0]
        at = found.end()
    if at < len(text):
        yield text[at:]
