"""Read a pickle as plain data, without running or importing anything that it names.

A pickle is a program for a small stack machine: Python's reader imports what the program names and calls it.
Here Python's reader is given a list of allowed names, and for each a class of our own (see ``Name``), so that
it calls nothing else; a pickle with another name is refused. Before that, one pass over the opcodes refuses
what would make Python's reader take memory or time out of proportion to the file, or crash: a place in the
memo beyond the next free one (it makes room for all between), a length beyond the file's end, a key of tuples
inside tuples (hashing it may take for ever, or overflow the C stack), and opcodes that torch never writes.

Source of the opcodes: Python's ``Lib/pickletools.py``, protocols 2 to 5, and ``Modules/_pickle.c``.
"""

import pickle
import pickletools
from collections.abc import Callable, Mapping
from functools import lru_cache
from io import BufferedReader, BytesIO
from struct import Struct
from struct import error as struct_error
from typing import Any, NoReturn

from ...parallel_state import BadInput, require
from ...system import no_garbage_search
from ..strict_json import shown

#: Makes what stands for an object in the result, of the arguments that its name is called with in the file.
#: A ``ValueError`` says what is wrong with them. The pickle may give a state to what it returns: a class
#: with ``__setstate__`` must refuse that, or take nothing from it.
Maker = Callable[[tuple[Any, ...]], object]


class Name(type):
    """Stand for something that a pickle names, such as ``torch.float32``: an own class, with its ``text``.

    To call it is to make a ``Record``, or what ``maker`` makes.
    """

    text: str
    maker: Maker | None


class Record(metaclass=Name):
    """Stand for an object: the name of what would make it, its arguments, and its state (mostly a dict)."""

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: object

    def __new__(cls, *args: Any) -> Any:
        """Return what the name's maker makes of the arguments; without a maker, a record of them."""
        if cls.maker is not None:
            return cls.maker(args)
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: object) -> None:
        if self.state is not None:
            raise ValueError(f"two states of a {self.name}")
        self.state = state

    @property
    def name(self) -> str:
        """Return the name of what would make this object."""
        return type(self).text

    def field(self, key: str) -> Any:
        """Return a field of the state, or ``None`` if there is none."""
        return self.state.get(key) if isinstance(self.state, dict) else None


class OrderedDict(dict[Any, Any]):
    """Stand for ``collections.OrderedDict``: a dict. Its attributes (``_metadata``) are left out."""

    __slots__ = ()

    @classmethod
    def make(cls, args: tuple[Any, ...]) -> "OrderedDict":
        """Make an empty one, to be filled; see ``Maker``."""
        if args:
            raise ValueError("an ordered dict with arguments, which torch does not write")
        return cls()

    def __setstate__(self, state: object) -> None:
        pass


#: Lists, dicts, tuples, records and places in the memo, whatever the file's size; further ones only for every
#: fifth byte, because torch's own files have at most 0.17 of them a byte.
_CONTAINERS = 50_000
#: Tuples inside one another, and marks on the stack; bytes of a text, and of an integer.
_DEEPEST, _LONGEST_TEXT, _LONGEST_INTEGER = 100, 1 << 20, 64
_TODO = "It is no file of tensors as torch writes it, or damaged; nothing of it was run"
_NOT_RUN = (
    "A pickle can run what it names; this one is not run, and no such name belongs to weights. "
    "Save the tensors alone, or use a file that you trust to write safetensors"
)

#: What an opcode does: it puts an object on the stack (a text after its length), makes one of others, puts
#: the topmost, or all above the mark, into the one below.
_REFUSED, _PROTO, _FRAME, _STOP, _PUSH, _TEXT, _NAME, _PUT, _GET, _MARK, _TUPLE, _OBJECT, _PLACE, _FILL = (
    range(14)
)
_KIND = {
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT"), _PUSH),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE"), _PUSH),
    **dict.fromkeys(("LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _TEXT),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _TEXT),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _PUT),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _GET),
    **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), _TUPLE),
    **dict.fromkeys(("REDUCE", "NEWOBJ", "STACK_GLOBAL", "BINPERSID"), _OBJECT),
    **dict.fromkeys(("APPEND", "BUILD"), _PLACE),
    **dict.fromkeys(("APPENDS", "SETITEM", "SETITEMS"), _FILL),
    **{"PROTO": _PROTO, "FRAME": _FRAME, "GLOBAL": _NAME, "MARK": _MARK, "STOP": _STOP},
}
#: How many objects these opcodes take; others of their kinds take all above the mark, or one.
_TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "SETITEM": 2, "REDUCE": 2, "NEWOBJ": 2, "STACK_GLOBAL": 2}
#: Bytes of the number before an argument that states its length, by ``pickletools``' sign for it.
_LENGTH = {-2: 1, -3: 4, -4: 4, -5: 8}
_BY_CODE = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
#: By the opcode's byte: its kind, how many objects it takes, and its bytes with an argument of fixed size or
#: the length of another one.
_KINDS, _COUNTS, _SIZES = [_REFUSED] * 256, [0] * 256, [1] * 256
for _code, _opcode in _BY_CODE.items():
    _KINDS[_code], _COUNTS[_code] = _KIND.get(_opcode.name, _REFUSED), _TAKEN.get(_opcode.name, 0)
    if _opcode.arg is not None and _opcode.name != "GLOBAL":
        _SIZES[_code] += _LENGTH.get(_opcode.arg.n, _opcode.arg.n)
_FOUR_BYTES = Struct("<I").unpack_from
_EMPTY, _BLOCK = b"]}", 1000


#: What Python's reader raises for a pickle that is damaged.
_DAMAGE = (pickle.UnpicklingError, ValueError, TypeError, LookupError, AttributeError, EOFError, struct_error)


def read_records(
    raw: bytes,
    where: object,
    allowed: Mapping[str, Maker | None],
    *,
    persistent: Maker | None = None,
    opcodes: int = 1_000_000,
    waiting: int = 50_000,
) -> object:
    """Return the object that a pickle describes, as plain data and records.

    ``allowed``: the names that may occur, each with what makes its record (``None``: a ``Record``). A mapping
    may answer for more names than it lists. ``persistent`` makes what stands for a persistent id (torch's
    storages). ``BadInput`` names ``where`` and what was found there: another name, an opcode that no writer
    of tensors uses, more ``opcodes`` (each makes at most one object of some 100 bytes), more objects that are
    not yet part of another one (``waiting``), more containers than torch makes for such a file, or damage.
    Shared and cyclic lists stay shared, so a caller that walks the result must count its steps.
    """
    try:
        with no_garbage_search():
            _check_opcodes(raw, where, opcodes, waiting)
            return _Unpickler(raw, where, allowed, persistent).load()
    except BadInput:
        raise
    except _DAMAGE as error:
        problem = shown(str(error), 200)
        raise BadInput(where, "pickle", expected="a whole pickle", found=problem, todo=_TODO) from None


def _check_opcodes(raw: bytes, where: object, most_opcodes: int, most_waiting: int) -> None:
    """Refuse what costs more than a file of this size may.

    For each object on the stack and in the memo it counts the levels of objects inside one another. Whether
    the objects are of the right types, Python's reader says.
    """
    depths: list[int] = []
    memo: list[int] = []
    marks: list[int] = []
    at, containers, most = 0, 0, _CONTAINERS + len(raw) // 5

    def refuse(at: int, expected: str, found: object) -> NoReturn:
        raise BadInput(where, f"pickle byte {at:,}", expected=expected, found=found, todo=_TODO)

    for _ in range(0, most_opcodes, _BLOCK):
        for _ in range(_BLOCK):
            if at >= len(raw):
                refuse(at, "further opcodes", "the end of the pickle: it was cut short")
            code = raw[at]
            kind, size = _KINDS[code], _SIZES[code]
            if kind == _PUSH:
                depths.append(0)
                containers += code in _EMPTY
            elif kind == _PUT:
                index = raw[at + 1] if size == 2 else _FOUR_BYTES(raw, at + 1)[0] if size == 5 else len(memo)
                if index > len(memo):
                    refuse(at, f"place {len(memo):,} of the memo, the next one", f"place {index:,}")
                if index == len(memo):
                    memo.append(depths[-1])
                else:
                    memo[index] = depths[-1]
            elif kind == _GET:
                index = raw[at + 1] if size == 2 else _FOUR_BYTES(raw, at + 1)[0]
                if index >= len(memo):
                    refuse(at, "an object seen before", f"number {index:,}, which is none")
                depths.append(memo[index])
            elif kind == _PLACE:
                depths.pop()
            elif kind == _OBJECT:
                del depths[-(_COUNTS[code] or 1) :]
                depths.append(0)
                containers += 1
            elif kind == _TUPLE:
                begin = len(depths) - _COUNTS[code] if _COUNTS[code] else marks.pop()
                depth = 1 + max(depths[begin:], default=0)
                del depths[begin:]
                depths.append(depth)
                containers += 1
                if depth > _DEEPEST:
                    refuse(at, f"at most {_DEEPEST} tuples inside one another", "more")
            elif kind == _FILL:
                begin = len(depths) - _COUNTS[code] if _COUNTS[code] else marks.pop()
                if _BY_CODE[code].name != "APPENDS" and max(depths[begin::2], default=0) > 1:
                    refuse(at, "a key of text or numbers", "tuples inside tuples")
                del depths[begin:]
            elif kind == _MARK:
                marks.append(len(depths))
            elif kind == _TEXT:
                length, name = int.from_bytes(raw[at + 1 : at + size], "little"), _BY_CODE[code].name
                longest = _LONGEST_INTEGER if name == "LONG1" else _LONGEST_TEXT
                if length > longest or at + size + length > len(raw):
                    refuse(at, f"at most {longest:,} bytes, before the end", f"{name} of {length:,} bytes")
                depths.append(0)
                at += length
            elif kind == _NAME:
                depths.append(0)
                containers += 1
                at = raw.index(b"\n", raw.index(b"\n", at) + 1)
            elif kind == _FRAME:
                if (length := int.from_bytes(raw[at + 1 : at + size], "little")) > len(raw) - at:
                    refuse(at, "a frame before the end", f"{length:,} bytes")
            elif kind == _STOP:
                return
            elif kind == _REFUSED:
                opcode = _BY_CODE[code].name if code in _BY_CODE else f"byte {code:#x}"
                refuse(at, "an opcode that torch writes", opcode)
            at += size
        if len(depths) > most_waiting or len(marks) > _DEEPEST:
            refuse(at, f"at most {most_waiting:,} objects, {_DEEPEST} marks that wait", "more")
        if containers + len(memo) > most:
            refuse(at, f"at most one list, dict, tuple or record for 5 of {len(raw):,} bytes", "more")
    refuse(at, f"at most {most_opcodes:,} opcodes", "more")


class _Unpickler(pickle.Unpickler):
    """Python's unpickler in a world in which the allowed names alone exist, each a class of our own."""

    def __init__(
        self, raw: bytes, where: object, allowed: Mapping[str, Maker | None], persistent: Maker | None
    ) -> None:
        super().__init__(BufferedReader(BytesIO(raw)))  # of a reader that cannot peek, it reads byte by byte
        self._where, self._allowed, self._persistent = where, allowed, persistent

    def find_class(self, module: str, name: str) -> Name:
        """Return what stands for a name; nothing is imported."""
        text = f"{module}.{name}"
        expected = "names of torch's tensors and of checkpoints"
        require(text in self._allowed, self._where, "pickle", expected, shown(text), _NOT_RUN)
        return _class_of(text, self._allowed[text])

    def persistent_load(self, reference: Any) -> object:
        """Return what stands for a storage."""
        if self._persistent is None or not isinstance(reference, tuple):
            raise ValueError("a reference to another place")
        return self._persistent(reference)


@lru_cache(maxsize=1024)
def _class_of(text: str, maker: Maker | None) -> Name:
    return Name(text, (Record,), {"__slots__": (), "text": text, "maker": maker and staticmethod(maker)})
