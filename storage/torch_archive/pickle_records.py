"""Read a pickle as plain records. Nothing that it names is imported, looked up or called.

A pickle is a program for a small stack machine; Python's own reader imports what the program names and calls
it. Here the same program builds only numbers, texts, tuples, lists, dicts, ``Name`` (where it names
something) and ``Record`` (where it would make an object). A name must be in a list of allowed names, or the
file is refused, so that a reader also knows every kind of record that it can meet. ``pickletools`` of the
standard library decodes the arguments of single opcodes; it, too, builds numbers and texts only.

Source of the opcodes: Python's ``Lib/pickletools.py``, protocols 2 to 5.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NoReturn

from ...parallel_state import BadInput
from ..strict_json import shown

#: Makes what stands for an object in the result, of the arguments that its name is called with in the file.
#: A ``ValueError`` says what is wrong with them.
Maker = Callable[[tuple[Any, ...]], object]


@dataclass(frozen=True, slots=True)
class Name:
    """Stand for something that a pickle names, such as ``torch.float32``."""

    text: str


@dataclass(eq=False, slots=True)
class Record:
    """Stand for an object: the name of what would make it, its arguments, and its state (mostly a dict)."""

    name: str
    args: tuple[Any, ...]
    state: object = None

    def field(self, key: str) -> Any:
        """Return a field of the state, or ``None`` if there is none."""
        return self.state.get(key) if isinstance(self.state, dict) else None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bound what a file may ask for.

    ``nodes``: opcodes, each of which makes at most one object of some 100 bytes. ``waiting``: objects that
    are not yet part of another one. ``depth``: levels of tuples, lists and dicts inside one another.
    """

    nodes: int = 1_000_000
    waiting: int = 50_000
    depth: int = 100
    integer_bits: int = 512
    text: int = 1 << 20


#: Opcodes that put their own argument on the stack.
_PLAIN = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TODO = "It is no file of tensors as torch writes it, or damaged; nothing of it was run"


def read_records(
    raw: bytes,
    where: object,
    allowed: Mapping[str, Maker | None],
    *,
    persistent: Maker | None = None,
    limits: Limits = Limits(),
) -> object:
    """Return the object that a pickle describes, as plain data and records.

    ``allowed``: the names that may occur, each with what makes its record (``None``: a ``Record``). A mapping
    may answer for more names than it lists. ``persistent`` makes what stands for a persistent id (torch's
    storages). ``BadInput`` names ``where``, the byte, and what was found there: another name, an opcode that
    no writer of tensors uses, a size beyond ``limits``, or damage. Shared and cyclic lists stay shared, so a
    caller that walks the result must count its steps.
    """
    machine, stream = _Machine(where, allowed, persistent, limits), BytesIO(raw)
    try:
        for _ in range(limits.nodes):
            machine.at = stream.tell()
            code = stream.read(1)
            if not code:
                machine.refuse("an end", "none")
            if code not in _OPCODES:  # before its argument is decoded: some old ones import a codec
                machine.refuse("an opcode that torch writes", _name_of(code))
            name, decode = _OPCODES[code]
            argument = None if decode is None else decode(stream)
            if name == "STOP":
                return machine.result()
            machine.step(name, argument)
    except BadInput:
        raise
    except (ValueError, TypeError, IndexError, OverflowError) as error:  # decoding failed, an empty stack
        machine.refuse("a whole pickle", shown(f"{type(error).__name__}: {error}"))
    machine.refuse(f"at most {limits.nodes:,} opcodes", "more")


class _Machine:
    """Hold the stack, the marks on it and the memo."""

    def __init__(
        self, where: object, allowed: Mapping[str, Maker | None], persistent: Maker | None, limits: Limits
    ) -> None:
        self.where, self.allowed, self.persistent, self.limits = where, allowed, persistent, limits
        self.at = 0
        self.stack: list[Any] = []
        #: How deep each object on the stack is, as far as it was filled when it came there.
        self.depths: list[int] = []
        self.marks: list[int] = []
        self.memo: dict[int, tuple[Any, int]] = {}

    def refuse(self, expected: str, found: object, todo: str = _TODO) -> NoReturn:
        raise BadInput(self.where, f"pickle byte {self.at:,}", expected=expected, found=found, todo=todo)

    def result(self) -> object:
        if len(self.stack) != 1 or self.marks:
            self.refuse("one object", f"{len(self.stack)}")
        return self.stack[0]

    def step(self, opcode: str, argument: Any) -> None:
        """Carry out one opcode."""
        if opcode in _PLAIN:
            self._plain(argument)
        elif opcode in _CONSTANTS:
            self._push(_CONSTANTS[opcode])
        else:
            _STEPS[opcode](self, argument)

    def _plain(self, value: Any) -> None:
        if isinstance(value, int) and value.bit_length() > self.limits.integer_bits:
            self.refuse(
                f"an integer of at most {self.limits.integer_bits} bits", f"{value.bit_length():,} bits"
            )
        if isinstance(value, str | bytes) and len(value) > self.limits.text:
            self.refuse(f"a text of at most {self.limits.text:,} bytes", f"{len(value):,}")
        self._push(value)

    def _push(self, value: Any, depth: int = 0) -> None:
        if depth > self.limits.depth:
            self.refuse(f"at most {self.limits.depth} levels inside one another", "more")
        if len(self.stack) >= self.limits.waiting:
            self.refuse(f"at most {self.limits.waiting:,} objects that wait for a place", "more")
        self.stack.append(value)
        self.depths.append(depth)

    def _pop(self) -> tuple[Any, int]:
        if self.marks and len(self.stack) <= self.marks[-1]:
            raise IndexError("nothing above the mark")
        return self.stack.pop(), self.depths.pop()

    def _pop_mark(self) -> tuple[list[Any], int]:
        begin = self.marks.pop()
        items, depth = self.stack[begin:], max(self.depths[begin:], default=0)
        del self.stack[begin:], self.depths[begin:]
        return items, depth

    def _top(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise IndexError("nothing above the mark")
        return self.stack[-1]

    def _deepen(self, depth: int) -> None:
        """Note that the object on top holds one of this depth."""
        value, before = self._pop()
        self._push(value, max(before, depth + 1))

    def mark(self, _: object) -> None:
        if len(self.marks) >= self.limits.depth:
            self.refuse(f"at most {self.limits.depth} levels inside one another", "more")
        self.marks.append(len(self.stack))

    def nothing(self, _: object) -> None:
        pass

    def put(self, index: int) -> None:
        self.memo[index] = self._top(), self.depths[-1]

    def memoize(self, _: object) -> None:
        self.memo[len(self.memo)] = self._top(), self.depths[-1]

    def get(self, index: int) -> None:
        if index not in self.memo:
            self.refuse("an object seen before", f"number {index:,}, which is none")
        self._push(*self.memo[index])

    def make_tuple(self, _: object) -> None:
        items, depth = self._pop_mark()
        self._push(tuple(items), depth + 1)

    def empty_tuple(self, _: object) -> None:
        self._push(())

    def tuple_of(self, count: int) -> None:
        items = [self._pop() for _ in range(count)][::-1]
        self._push(tuple(value for value, _ in items), 1 + max(depth for _, depth in items))

    def empty_list(self, _: object) -> None:
        self._push([])

    def empty_dict(self, _: object) -> None:
        self._push({})

    def append(self, _: object) -> None:
        item, depth = self._pop()
        self._extend([item], depth)

    def appends(self, _: object) -> None:
        self._extend(*self._pop_mark())

    def _extend(self, items: list[Any], depth: int) -> None:
        target = self._top()
        if not isinstance(target, list):
            self.refuse("a list to append to", type(target).__name__)
        target.extend(items)
        self._deepen(depth)

    def set_item(self, _: object) -> None:
        (value, depth), (key, _) = self._pop(), self._pop()
        self._update([key, value], depth)

    def set_items(self, _: object) -> None:
        self._update(*self._pop_mark())

    def _update(self, items: list[Any], depth: int) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(items) % 2:
            self.refuse("a dict and pairs to put in", f"{type(target).__name__}, {len(items)} items")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not _is_key(key):
                self.refuse("a key of text or numbers", type(key).__name__)
            target[key] = value
        self._deepen(depth)

    def name_in_place(self, argument: str) -> None:
        self._name(*argument.split(" ", 1))

    def name_on_stack(self, _: object) -> None:
        (name, _), (module, _) = self._pop(), self._pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            self.refuse("a name", f"{type(module).__name__} and {type(name).__name__}")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        text = f"{module}.{name}"
        if text not in self.allowed:
            todo = (
                "A pickle can run what it names; this one is not run, and no such name belongs to weights. "
                "Save the tensors alone, or use a file that you trust to write safetensors"
            )
            self.refuse("names of torch's tensors and of checkpoints", shown(text), todo)
        self._push(Name(text))

    def call(self, _: object) -> None:
        (args, depth), (name, _) = self._pop(), self._pop()
        if not isinstance(name, Name) or not isinstance(args, tuple):
            self.refuse("an allowed name and its arguments", f"{type(name).__name__}, {type(args).__name__}")
        make = self.allowed[name.text]
        try:
            self._push(Record(name.text, args) if make is None else make(args), depth + 1)
        except ValueError as error:
            if isinstance(error, BadInput):
                raise
            self.refuse(f"arguments of {name.text}", str(error))

    def build(self, _: object) -> None:
        (state, depth), target = self._pop(), self._top()
        if isinstance(target, Record) and target.state is None:
            target.state = state
            self._deepen(depth)
        elif not isinstance(target, dict):  # an OrderedDict may have attributes (_metadata): left out
            self.refuse("an object that gets its state", type(target).__name__)

    def storage(self, _: object) -> None:
        if self.persistent is None:
            self.refuse("no reference to another place", "one")
        args, _ = self._pop()
        if not isinstance(args, tuple):
            self.refuse("a storage", type(args).__name__)
        try:
            self._push(self.persistent(args))
        except ValueError as error:
            if isinstance(error, BadInput):
                raise
            self.refuse("a storage", str(error))


def _is_key(key: object) -> bool:
    """Return whether this is a plain key. A tuple is looked at one level deep: hashing more could overflow
    the stack.
    """
    plain = str | bytes | int | float | Name | Record | None
    return isinstance(key, plain) or (isinstance(key, tuple) and all(isinstance(one, plain) for one in key))


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), _Machine.nothing),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    "MARK": _Machine.mark,
    "MEMOIZE": _Machine.memoize,
    "TUPLE": _Machine.make_tuple,
    "EMPTY_TUPLE": _Machine.empty_tuple,
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "EMPTY_LIST": _Machine.empty_list,
    "EMPTY_DICT": _Machine.empty_dict,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "GLOBAL": _Machine.name_in_place,
    "STACK_GLOBAL": _Machine.name_on_stack,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.storage,
}
#: Each known opcode with its name and what decodes its argument, if it has one.
_OPCODES = {
    one.code.encode("latin-1"): (one.name, None if one.arg is None else one.arg.reader)
    for one in pickletools.opcodes
    if one.name in {*_STEPS, *_PLAIN, *_CONSTANTS, "STOP"}
}


def _name_of(code: bytes) -> str:
    names = {one.code: one.name for one in pickletools.opcodes}
    return names.get(code.decode("latin-1"), shown(code))
