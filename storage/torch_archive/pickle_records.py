"""Read a pickle as plain records. Nothing that it names is imported, looked up or called.

A pickle is a program for a small stack machine; Python's own reader imports what the program names and calls
it. Here the same program builds only numbers, texts, tuples, lists, dicts, ``Name`` (where it names
something) and ``Record`` (where it would make an object). A name must be in a list of allowed names, or the
file is refused, so that a reader also knows every kind of record that it can meet. ``pickletools`` of the
standard library decodes the arguments of single opcodes; it, too, builds numbers and texts only.

Source of the opcodes: Python's ``Lib/pickletools.py``, protocols 2 to 5.
"""

import pickletools
from collections.abc import Mapping
from io import BytesIO

from ...parallel_state import BadInput
from ..strict_json import shown
from .pickle_machine import CONSTANTS, CONTAINERS, PLAIN, STEPS, Machine
from .records import USUAL, Limits, Maker

#: Each known opcode with its name and what decodes its argument, if it has one.
_OPCODES = {
    opcode.code.encode("latin-1"): (opcode.name, None if opcode.arg is None else opcode.arg.reader)
    for opcode in pickletools.opcodes
    if opcode.name in {*STEPS, *PLAIN, *CONSTANTS, "STOP"}
}


def read_records(
    raw: bytes,
    where: object,
    allowed: Mapping[str, Maker | None],
    *,
    persistent: Maker | None = None,
    limits: Limits = USUAL,
) -> object:
    """Return the object that a pickle describes, as plain data and records.

    ``allowed``: the names that may occur, each with what makes its record (``None``: a ``Record``). A mapping
    may answer for more names than it lists. ``persistent`` makes what stands for a persistent id (torch's
    storages). ``BadInput`` names ``where``, the byte, and what was found there: another name, an opcode that
    no writer of tensors uses, a size beyond ``limits``, or damage. Shared and cyclic lists stay shared, so a
    caller that walks the result must count its steps.
    """
    machine, stream = Machine(where, allowed, persistent, limits), BytesIO(raw)
    containers = limits.containers + len(raw) // 5
    try:
        for _ in range(limits.nodes):
            machine.at = stream.tell()
            code = stream.read(1)
            if not code:
                machine.refuse("further opcodes", "the end of the pickle: it was cut short")
            if code not in _OPCODES:  # before its argument is decoded: some old ones import a codec
                machine.refuse("an opcode that torch writes", _name_of(code))
            name, decode = _OPCODES[code]
            argument = None if decode is None else decode(stream)
            if name == "STOP":
                return machine.result()
            machine.step(name, argument)
            containers -= name in CONTAINERS
            if containers < 0:
                machine.refuse(f"at most one list, dict, tuple or record for 5 of {len(raw):,} bytes", "more")
    except BadInput:
        raise
    except (ValueError, TypeError, IndexError, OverflowError) as error:  # decoding failed, an empty stack
        machine.refuse("a whole pickle", shown(f"{type(error).__name__}: {error}"))
    machine.refuse(f"at most {limits.nodes:,} opcodes", "more")


def _name_of(code: bytes) -> str:
    names = {opcode.code: opcode.name for opcode in pickletools.opcodes}
    return names.get(code.decode("latin-1"), shown(code))
