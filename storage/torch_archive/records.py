"""Define the plain data that a pickle becomes, and how much of it a file may ask for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

    ``nodes``: opcodes, each of which makes at most one object of some 100 bytes. ``containers``: lists,
    dicts, tuples, records and places in the memo, whatever the file's size; further ones only for every
    fifth byte, because torch's own files have at most 0.17 of them a byte. ``waiting``: objects that are
    not yet part of another one. ``depth``: levels of tuples, lists and dicts inside one another.
    """

    nodes: int = 1_000_000
    containers: int = 50_000
    waiting: int = 50_000
    depth: int = 100
    integer_bits: int = 512
    text: int = 1 << 20


#: The limits of an archive's pickle.
USUAL = Limits()
