"""Say in one line on standard error why a command failed, and choose its exit code."""

import os
import re
import sys

import typer

from ..system import refusal_of, visible
from ..system.refusals import UNEXPECTED

USAGE, PREEMPTED, INTERRUPTED = 2, 75, 130


def write_error(code: int, message: str) -> None:
    """Write the line of a failure, in colour on a terminal that has them (unless ``NO_COLOR`` is set)."""
    word, color = ("stopped", "yellow") if code == PREEMPTED else ("error", "red")
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and not dumb:
        word = typer.style(word, fg=color, bold=True)
    sys.stderr.write(f"{word}: {message}\n")


def explain(error: Exception) -> tuple[int, str]:
    """Return the exit code of an error, and its message in one line."""
    if format_message := getattr(error, "format_message", None):  # typer's and click's usage errors
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "trilith"
        key = str(getattr(error, "option_name", "")).lstrip("-")
        if "." in key:  # as other trainers have it
            return USAGE, f"No such option: --{key}. A key of a recipe has no dashes: {key}=VALUE"
        message = _one_line(format_message()).replace("Value error, ", "").rstrip(".")
        return USAGE, f"{message}{'' if message.endswith('?') else '.'} See {command} --help"
    # Told by their exit code rather than by class: importing our error classes here would import torch.
    code, refusal = getattr(error, "exit_code", None), refusal_of(error)
    if isinstance(code, int):
        # A library that was refused a file descriptor may say that the file makes no sense.
        if code == USAGE and refusal is not None and refusal.code != USAGE:
            return refusal.code, f"{_one_line(str(error))} ({_one_line(str(refusal))})"
        return code, _one_line(str(error))
    if refusal is not None:
        return refusal.code, _one_line(str(refusal))
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    read = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    again = "for the traceback run it as trilith --debug ..."
    return UNEXPECTED, f"unexpected: {_one_line(what + read)} ({again})"


#: A part of a path longer than a file's name may be, and a word longer than any path that somebody types.
_ENDLESS = re.compile(r"[^\s/]{256,}|\S{1000,}")


def _one_line(text: str) -> str:
    """Return the text in one line, with words shortened that no path on a disk can have."""
    return visible(_ENDLESS.sub(_shorten, " ".join(text.split())))


def _shorten(word: re.Match[str]) -> str:
    return f"{word[0][:40]}...{word[0][-20:]} ({len(word[0]):,} characters)"
