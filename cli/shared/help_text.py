"""Lay out a command's docstring as its help: paragraphs for any width of a terminal, examples that fit."""

import inspect
import re

#: The columns of a terminal that examples fit in, with a margin of one on each side.
_COLUMNS = 80


def help_text(docstring: str) -> str:
    """Join the lines of each paragraph, so that a terminal of any width wraps them; keep indented lines, and
    continue long ones on the next line as a shell does.
    """
    text = re.sub(r"(?<=\S)\n(?=\S)| \\\n +", " ", inspect.cleandoc(docstring))
    return re.sub(rf"^    .{{{_COLUMNS - 5},}}$", _continued, text, flags=re.MULTILINE)


def _continued(line: re.Match[str]) -> str:
    lines = [""]
    for word in re.findall(r"(?:[^\s\"]|\"[^\"]*\")+", line[0]):
        if len(lines[-1]) + len(word) > _COLUMNS - 10:
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(f"   {line}" for line in lines)
