"""Carry out a pickle's opcodes on a stack that holds plain data, names and records, within limits."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ...parallel_state import BadInput
from ..strict_json import shown
from .records import Limits, Maker, Name, Record

#: Opcodes that put their own argument on the stack.
PLAIN = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
#: Opcodes that make an object with room for others, or a place in the memo: each takes some 100 bytes.
CONTAINERS = {
    *("EMPTY_LIST", "EMPTY_DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ"),
    *("GLOBAL", "STACK_GLOBAL", "MEMOIZE", "BINPUT", "LONG_BINPUT"),
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TODO = "It is no file of tensors as torch writes it, or damaged; nothing of it was run"


class Machine:
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
        if opcode in PLAIN:
            self._plain(argument)
        elif opcode in CONSTANTS:
            self._push(CONSTANTS[opcode])
        else:
            STEPS[opcode](self, argument)

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
    return isinstance(key, plain) or (isinstance(key, tuple) and all(isinstance(part, plain) for part in key))


#: What each other opcode does, but for STOP.
STEPS: dict[str, Callable[[Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), Machine.nothing),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), Machine.get),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), Machine.call),
    "MARK": Machine.mark,
    "MEMOIZE": Machine.memoize,
    "TUPLE": Machine.make_tuple,
    "EMPTY_TUPLE": Machine.empty_tuple,
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "EMPTY_LIST": Machine.empty_list,
    "EMPTY_DICT": Machine.empty_dict,
    "APPEND": Machine.append,
    "APPENDS": Machine.appends,
    "SETITEM": Machine.set_item,
    "SETITEMS": Machine.set_items,
    "GLOBAL": Machine.name_in_place,
    "STACK_GLOBAL": Machine.name_on_stack,
    "BUILD": Machine.build,
    "BINPERSID": Machine.storage,
}
