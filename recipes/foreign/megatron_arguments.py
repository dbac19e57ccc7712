"""Read Megatron's arguments, by their names in ``arguments.py``, from a log, a command or JSON.

Megatron resolves its arguments and prints them at the start of a run; a shell gives the words of a script.
So neither is done here.
"""

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...parallel_state import BadInput, require
from ...storage.safe_open import open_regular
from ...storage.small_files import read_json
from ...system import literal, whole_number
from .translation import settings_of

_TORCHRUN = ("nproc_per_node", "nnodes")
#: What a user puts in the place of torchrun.
COMMAND = "trilith recipe from-megatron --"
#: Bytes of a log in which Megatron's arguments stand, so that reading takes a moment.
_START = 2**20
#: A line of Megatron's, ``  lr ... 0.0003``, maybe behind a rank's name; a name of 48 letters has no dots.
_PRINTED = re.compile(r"^(?:\S*:)? *(\w+) (?:\.+|(?<=\w{48} ))(?: (.*\S))?[ \r]*$", re.MULTILINE)
_LITERALS: dict[str, Any] = {"None": None, "True": True, "False": False}


@dataclass(frozen=True)
class Arguments:
    """Hold arguments by name, the number of ranks if it is said, and lines about what is unsure."""

    values: Mapping[str, Any]
    ranks: int | None
    unsure: list[str]


def read_arguments(file: Path) -> Arguments:
    """Read what Megatron printed in a log, or stored arguments (``.json``).

    Raises ``BadInput`` for a file without arguments, and for two values of one argument.
    """
    if file.suffix == ".json":
        raw = read_json(file)
        return _normalized(raw["args"] if isinstance(raw.get("args"), dict) else raw, [], file)
    return _normalized(_of_log(file), [], file)


def arguments_of(words: Sequence[str]) -> Arguments:
    """Read the words of a command: those of ``torchrun``, a program's file, and Megatron's arguments.

    Raises ``BadInput`` for words without a program or without arguments.
    """
    programs = [at for at, word in enumerate(words) if word.endswith(".py")]
    fits = programs and any(word.startswith("--") for word in words[programs[0] :])
    require(fits, COMMAND, None, "a .py file and arguments after it", " ".join(words)[:60] or "nothing")
    launcher, paths = dict(_flags(words[: programs[0]])), settings_of("megatron")["paths"].split()
    raw, unsure = {key: launcher[key] for key in _TORCHRUN if key in launcher}, list[str]()
    for key, value in _flags(words[programs[0] + 1 :]):
        if key in raw and raw[key] != value:
            unsure.append(f"{key} = {raw[key]}: said again, and the last counts: {value}")
        raw[key] = None if value is True and key in paths else value
    return _normalized(raw, unsure, COMMAND)


def _normalized(raw: Mapping[str, Any], unsure: list[str], where: object) -> Arguments:
    """Return the arguments by Megatron's names of today: of two names of one, the value that is not null.

    Raises ``BadInput`` for two different values.
    """
    values: dict[str, Any] = {}
    aliases, flags = (settings_of("megatron")[table] for table in ("aliases", "flags"))
    for key, value in raw.items():
        name = aliases.get(key, key)
        if value is True and name in flags:
            name, value = flags[name]
        if name in values and values[name] != value and None not in (values[name], value):
            raise BadInput(where, name, expected=f"one value, {literal(values[name])}", found=literal(value))
        if values.get(name) is None:
            values[name] = value
    return Arguments(values, _ranks(values), unsure)


def _ranks(values: dict[str, Any]) -> int | None:
    """Return the number of processes, ``world_size`` or processes a node times nodes, if it is said."""
    if (world := whole_number(str(values.get("world_size")))) is not None:
        del values["world_size"]
        return world
    texts = [str(values.pop(key, "" if key == "nproc_per_node" else "1")) for key in _TORCHRUN]
    processes, nodes = map(whole_number, texts)
    return processes * nodes if processes is not None and nodes is not None else None


def _of_log(file: Path) -> dict[str, Any]:
    """Return the arguments that Megatron prints at the start of a run."""
    with open_regular(file) as (log, _):
        text = os.read(log, _START).decode(errors="replace").partition("end of arguments")[0]
    if not (raw := {name: _literal(value) for name, value in _PRINTED.findall(text)}):
        todo = f"In a script, put `{COMMAND}` in the place of torchrun, and run it"
        expected = 'what Megatron prints, lines such as "  lr ........ 0.0003", or .json'
        raise BadInput(file, expected=expected, found="none", todo=todo)
    return raw


def _literal(text: str) -> Any:
    if text.startswith("["):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return ast.literal_eval(text)
    return _LITERALS.get(text, text)


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield ``--name value`` as its name and a text, several values as a list, and none as true."""
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if word.startswith("--"):
            if name:
                yield name, True if not values else values[0] if len(values) == 1 else values
            name, equals, value = word[2:].partition("=")
            name, values = name.replace("-", "_"), [value] if equals else []
        elif name:
            values.append(word)
