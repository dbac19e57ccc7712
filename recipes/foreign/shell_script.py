"""Read the command of a shell script, as far as the script itself says it. Nothing is run.

Variables, arrays, defaults (``${NAME:-8}``), sums (``$((A*B))``) and simple conditions are followed. No
variable of this machine's environment is read: what the script does not say stays as ``$NAME``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator

from ...parallel_state import BadInput
from .shell_words import PARAMETER, SUM, pieces, statements

_ASSIGNMENT = re.compile(
    r"(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL
)
_TEXTS: dict[str, Callable[[str, str], bool]] = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    **{"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt},
    **{"-le": operator.le, "-gt": operator.gt, "-ge": operator.ge},
}
#: Words that open and close what may be carried out any number of times.
_OPEN, _CLOSE = {"for", "while", "until", "case", "function", "select"}, {"done", "esac", "}"}
_STRUCTURE = {*_OPEN, *_CLOSE, "if", "elif", "fi"}
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: int(left / right),
    ast.FloorDiv: lambda left, right: int(left / right),
    ast.Mod: operator.mod,
}
#: No script that anybody wrote expands to more.
_MOST_WORDS, _LONGEST = 2**14, 2**20


class ShellScript:
    """Collect the variables and the commands of a script; ``unsure`` lists what could not be followed."""

    def __init__(self, text: str, where: str) -> None:
        self.where = where
        self.variables: dict[str, list[str]] = {}
        self.commands: list[list[str]] = []
        self.unsure: list[str] = []
        #: For each ``if`` around a statement: whether this branch counts, and whether one has counted.
        self._branches: list[tuple[bool, bool]] = []
        self._loops = 0
        #: Whether the last command succeeded, and whether the next one is left out because of it.
        self._well, self._left_out = True, False
        for words in statements(text, where):
            self._take(words)

    def _take(self, words: list[str]) -> None:
        """Carry out one statement: an assignment, a condition, or a command to be noted."""
        while words and words[0] in ("then", "do", "{", "("):
            words = words[1:]
        if not words:
            return
        first = words[0]
        if first in ("&&", "||"):
            self._left_out = self._well == (first == "||")
            return
        if first == "if":
            self._branches.append((self._holds(words[1:]),) * 2)
        elif first in ("elif", "else") and self._branches:
            _, before = self._branches.pop()
            holds = not before and (first == "else" or self._holds(words[1:]))
            self._branches.append((holds, before or holds))
            words = words[1:] if first == "else" else []
        elif first == "fi" and self._branches:
            self._branches.pop()
        elif first in _OPEN or words[0].endswith("()") or words[1:2] == ["()"]:
            self._loops += 1
            self.unsure.append(f"{' '.join(words)[:60]}: what a loop or a function does is not followed")
        elif first in _CLOSE:
            self._loops = max(0, self._loops - 1)
        if first not in _STRUCTURE and words and self._counts():
            self._carry_out(words)
        self._left_out = False

    def _counts(self) -> bool:
        """Return whether a statement here is carried out, once."""
        return not (self._loops or self._left_out) and all(counts for counts, _ in self._branches)

    def _carry_out(self, words: list[str]) -> None:
        while words and words[0] in ("export", "declare", "local", "readonly"):
            words = [word for word in words[1:] if not word.startswith("-")]
        while words and (found := _ASSIGNMENT.fullmatch(words[0])):
            name, more, value = found.groups()
            if value == "(":
                end = words.index(")")
                values = [one for word in words[1:end] for one in self.expand(word)]
                words = words[end + 1 :]
            else:
                values, words = [" ".join(self.expand(value, split=False))], words[1:]
            if more and value != "(":
                values = ["".join([*self.variables.get(name, [""]), *values])]
            elif more:
                values = self.variables.get(name, []) + values
            if len(values) > _MOST_WORDS or sum(map(len, values)) > _LONGEST:
                raise BadInput(self.where, name, expected=f"at most {_MOST_WORDS} words", found="more")
            self.variables[name] = values
        self._well = True
        if words[:1] in (["["], ["[["]):
            self._well = self._holds(words)
        elif words:
            self.commands.append([one for word in words for one in self.expand(word)])

    def expand(self, word: str, *, split: bool = True) -> list[str]:
        """Return the words that a word becomes: variables in their places, quotes taken away.

        ``split``: whether what a variable outside of quotes holds is split at blanks.
        """
        made: list[str] = []
        current, started = "", False
        for piece, quote in pieces(word):
            if quote == "'":
                current, started = current + piece, True
                continue
            whole = PARAMETER.fullmatch(piece)
            if whole and whole[2] and whole[1] in self.variables and quote == '"' and whole[2] == "[@]":
                *others, last = [""] if not self.variables[whole[1]] else self.variables[whole[1]]
                for one in others:
                    made.append(current + one)
                    current = ""
                current, started = current + last, started or bool(self.variables[whole[1]])
                continue
            text = self._filled(piece)
            if quote == '"' or not split or text == piece:
                current, started = current + text, True
                continue
            parts = text.split()
            for number, part in enumerate(parts):
                if number or (text[:1].isspace() and current):
                    made.append(current)
                    current = ""
                current, started = current + part, True
        return [*made, current] if started else made

    def _filled(self, text: str, depth: int = 0) -> str:
        """Return the text with the values of variables and of sums."""

        def value(found: re.Match[str]) -> str:
            name = found[1] or found[5]
            known = self.variables.get(name)
            form, other = found[3], found[4] or ""
            if known is not None and (form is None or "+" not in form):
                if form and form.startswith(":") and not "".join(known):
                    return self._filled(_unquoted(other), depth + 1)
                return " ".join(known)
            if form is not None and "+" not in form and depth < 8:
                return self._filled(_unquoted(other), depth + 1)
            if form is not None:
                return self._filled(_unquoted(other), depth + 1) if known and depth < 8 else ""
            return found[0]

        text = PARAMETER.sub(value, text)
        if len(text) > _LONGEST:
            raise BadInput(self.where, expected=f"at most {_LONGEST} characters in a word", found="more")
        return SUM.sub(lambda found: _sum_of(found[1], self.variables) or found[0], text)

    def _holds(self, words: list[str]) -> bool:
        """Return whether a condition holds; one that the script does not decide counts as false."""
        holds, joined = False, "||"
        for part, after in _conditions(words):
            one = self._test(part)
            if one is None:
                said = " ".join(words)
                self.unsure.append(f"if {said[:60]}: the script alone does not say it, so it counts as false")
                return False
            holds = (holds or one) if joined == "||" else (holds and one)
            joined = after
        return holds

    def _test(self, words: list[str]) -> bool | None:
        words = [word for word in words if word not in ("[", "[[", "]", "]]", "then")]
        if words[:1] == ["!"]:
            inner = None if words[1:2] == ["!"] else self._test(words[1:])
            return None if inner is None else not inner
        sides = [" ".join(self.expand(word, split=False)) for word in words]
        if len(sides) == 2 and words[0] in ("-n", "-z"):
            value = "" if PARAMETER.fullmatch(sides[1]) else sides[1]  # unset: empty
            return bool(value) == (words[0] == "-n")
        if len(sides) != 3 or any("$" in side for side in sides):
            return None
        left, comparison, right = sides
        if comparison in _TEXTS:
            return _TEXTS[comparison](left, right)
        if comparison in _NUMBERS and left.isdecimal() and right.isdecimal():
            return _NUMBERS[comparison](int(left[:18]), int(right[:18]))
        return None


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _conditions(words: list[str]) -> Iterator[tuple[list[str], str]]:
    part: list[str] = []
    for word in words:
        if word in ("&&", "||"):
            yield part, word
            part = []
        else:
            part.append(word)
    yield part, ""


def _sum_of(text: str, variables: dict[str, list[str]]) -> str | None:
    """Return the value of whole numbers joined by + - * / and %; ``None`` for anything else."""
    named = re.sub(r"[A-Za-z_]\w*", lambda found: " ".join(variables.get(found[0], [found[0]])), text)

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 2**53:
            return node.value
        raise ValueError

    try:
        return str(value(ast.parse(named.strip()[:200], mode="eval").body))
    except (ValueError, SyntaxError, ArithmeticError, RecursionError):
        return None
