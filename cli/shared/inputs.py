"""Refuse an input that is not there before the imports that take seconds, such as torch's."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...system.addresses import address_of

#: A name such as "meta-llama/Llama-3.2-1B", which may be that of a model of the hub.
_OF_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


class NoSuchInput(ValueError):
    """Report an input that is not there, in the words and with the exit code of ``BadInput``, whose module
    imports torch.
    """

    exit_code = 2

    def __init__(self, where: object, *, expected: str, found: str) -> None:
        self.where, self.expected, self.found = where, expected, found
        super().__init__(f"{where}: expected {expected}, found {found}")


def check_there(name: str | Path, expected: str, *, kind: str = "folder") -> None:
    """Raise ``NoSuchInput`` for a path where nothing is, nor anything whose name has this one in it.

    Whether such a thing, an address or a model of the hub will do is found out later.
    """
    path = Path(name)
    if address_of(name) is not None or os.path.lexists(path):
        return
    if kind != "file" and _OF_THE_HUB.fullmatch(str(name)):
        return
    try:
        others = os.listdir(path.parent)
    except FileNotFoundError:
        others = []
    except OSError:  # not one to look into
        return
    if path.name in ("", "..") or any(path.name in other for other in others):
        return  # a token file's name, or what a killed command left
    raise NoSuchInput(name, expected=expected, found=f"no such {kind}")
