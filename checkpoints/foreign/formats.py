"""List the formats of other projects that are read, and tell which of them a path holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import dcp
from .checkpoint import ForeignCheckpoint


@dataclass(frozen=True, slots=True)
class Format:
    """Hold a format: its name for the user, how it is recognised, and its reader (headers only).

    ``recognise`` looks at names of files, and at small files where names do not decide. A checkpoint that the
    reader cannot read is still recognised, so that the reader can say what to do.
    """

    name: str
    recognise: Callable[[Path], bool]
    read: Callable[[Path], ForeignCheckpoint]


#: In this order: a format whose folder holds files of a later one comes before it.
FORMATS: tuple[Format, ...] = (Format(dcp.FORM, dcp.recognise, dcp.read),)


def format_of(path: Path) -> Format | None:
    """Return the format of a folder or file, or ``None`` if it is of none."""
    return next((one for one in FORMATS if one.recognise(path)), None)
