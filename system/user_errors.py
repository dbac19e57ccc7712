"""Say in one line what the user's own code raised, with the place in his file."""

import sys
from types import FrameType, TracebackType
from typing import Any

from . import visible
from .errors import BadInput

#: This package: no code of its files is the user's.
PACKAGE = __name__.partition(".")[0]


def refused(error: BaseException, key: str, *, expected: str) -> BadInput:
    """Return the refusal for an error of the user's code: one line with the place in his file."""
    place = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else ""
    place = place or line_of_user(error.__traceback__)
    first = str(error).partition("\n")[0][:160]
    message = f"{type(error).__name__}: {first}" + (f" ({place})" if place else "")
    return BadInput("recipe", key, expected=expected, found=visible(message))


def asked(ask: Any, key: str, expected: str) -> Any:
    """Return what the user's code answers; ``BadInput`` with its error, or the line that met a refusal."""
    try:
        return ask()
    except BadInput as error:
        if not (place := line_of_user(error.__traceback__)):
            raise
        facts = {"expected": error.expected, "found": error.found}
        todo = f"{error.todo} ({place})".strip()
        raise type(error)(error.where, error.key, **facts, todo=todo) from error
    except (Exception, SystemExit) as error:
        raise refused(error, key, expected=expected) from error


def line_of_user(trace: TracebackType | None) -> str:
    """Return a traceback's innermost place outside Python's library, torch and this package, if any."""
    place = ""
    while trace is not None:
        package = package_of(trace.tb_frame)
        if package not in ("torch", PACKAGE) and package not in sys.stdlib_module_names:
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def package_of(frame: FrameType) -> str:
    """Return the name of the package whose code a frame runs."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
