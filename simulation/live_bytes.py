"""Count the bytes of live tensors, now and at the worst moment: to the byte, on any device.

Memory that an operator uses only while it runs is not seen. What it leaves behind is seen, also if only
autograd holds it.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from ..parallel_state.engine import is_dtensor, local_data, tensors_in
from ..parallel_state.engine.autograd_and_compiler import UncompiledMode

#: What torch calls to ask for the device of a tensor without numbers: half of all calls.
DEVICE = torch.ops.prim.device.default


@dataclass(eq=False, slots=True)
class Storage:
    """Follow a storage: its bytes, and the numbers of the operators that ``made`` it and after which it was
    ``gone``; what it is, and the operator that made it, in which module and phase, as far as that is noted.
    """

    made: int
    size: int = 0
    gone: int | None = None
    kind: str = ""
    module: str = ""
    phase: str = ""
    operator: str = ""


class Part(NamedTuple):
    """Hold where a tensor lies: its bytes in memory, its place in a storage, and what is known of this."""

    size: int
    place: int
    untyped: torch.UntypedStorage
    storage: Storage | None

    @property
    def key(self) -> object:
        """Return what tells the storage from others, also if it is not counted."""
        return self.storage or self.untyped


class Call(NamedTuple):
    """Hold an operator's call: where lies what it ``read`` and ``made``, of tensors that count, and the
    storages that are ``new``.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    read: list[Part]
    made: list[Part]
    new: list[Storage]


class LiveBytes(UncompiledMode):
    """Count the bytes of the storages that operators make while this context is entered, and of those given
    at first.

    ``LiveBytes(model.parameters())`` counts the parameters too. ``now``: the bytes alive. ``peak``: the most
    bytes after any operator. A storage that was emptied (FSDP's) counts as empty, and so does one on the meta
    device, which has no memory.
    """

    def __init__(self, *first: Any) -> None:
        super().__init__()
        self.now = self.peak = 0
        #: The number of operators so far.
        self.at = 0
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Storage]] = {}
        for tensor in self._counted([list(part) if isinstance(part, Iterator) else part for part in first]):
            self._follow(tensor.untyped_storage())

    def __enter__(self) -> Any:
        for entry, storage in [*self._alive.values()]:
            self._measure(entry(), storage)
        resize = torch.UntypedStorage.resize_

        def resized(untyped: torch.UntypedStorage, size: int) -> Any:
            out = resize(untyped, size)
            if (entry := self._alive.get(id(untyped))) is not None:
                self._measure(untyped, entry[1])
            return out

        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", resized)
        self._resizing.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._resizing.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE:
            return device_of(args[0])
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        read = [*map(self._part, self._counted((*args, *kwargs.values())))]
        out = self._call(func, args, kwargs)
        self.at += 1
        made, new, read_ids = list[Part](), list[Storage](), {id(part.untyped) for part in read}
        for tensor in self._counted(out):
            untyped = tensor.untyped_storage()
            # A view of what is not counted is not counted either.
            if id(untyped) not in read_ids and id(untyped) not in self._alive:
                new.append(self._follow(untyped))
            made.append(self._part(tensor))
        for part in read:
            if part.storage is not None and part.storage.size != (size := part.untyped.nbytes()):
                self._change(part.storage, size)
        self._note(Call(func, args, kwargs, out, read, made, new))
        return out

    def storage(self, tensor: Tensor) -> Storage | None:
        """Return what is known of a tensor's storage, if it is counted."""
        entry = self._alive.get(id(tensor.untyped_storage()))
        return None if entry is None else entry[1]

    def _counted(self, value: object) -> list[Tensor]:
        """Return what this rank stores of tensors that count, in nested lists, tuples and dicts."""
        return [stored(tensor) for tensor in tensors_in(value) if device_of(tensor).type != "meta"]

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _note(self, call: Call) -> None:
        """Note an operator that has been called."""

    def _part(self, tensor: Tensor) -> Part:
        untyped, strides, size = tensor.untyped_storage(), tensor.stride(), tensor.nbytes
        if 0 in strides:  # an expanded dim lies there once
            sizes = zip(tensor.shape, strides, strict=True)
            size = tensor.itemsize * prod(length for length, stride in sizes if stride)
        entry = self._alive.get(id(untyped))
        return Part(size, int(tensor.storage_offset()), untyped, None if entry is None else entry[1])

    def _follow(self, untyped: torch.UntypedStorage) -> Storage:
        key, storage = id(untyped), Storage(self.at)
        self._alive[key] = weakref.ref(untyped, partial(self._forget, key)), storage
        self._change(storage, untyped.nbytes())
        return storage

    def _measure(self, untyped: torch.UntypedStorage | None, storage: Storage) -> None:
        if untyped is not None and storage.size != (size := untyped.nbytes()):
            self._change(storage, size)

    def _change(self, storage: Storage, size: int) -> None:
        self.now += size - storage.size  # nothing is called between: another thread may drop a storage
        storage.size = size
        if self.now > self.peak:
            self.peak = self.now

    def _forget(self, key: int, gone: object) -> None:
        if (entry := self._alive.pop(key, None)) is not None:
            entry[1].gone = self.at
            self._change(entry[1], 0)


def device_of(tensor: Tensor) -> torch.device:
    """Return a tensor's device; torch would ask every mode for that of a fake one."""
    device: torch.device | None = getattr(tensor, "fake_device", None)
    return tensor.device if device is None else device


def stored(tensor: Tensor) -> Tensor:
    """Return what this rank stores of a tensor."""
    return local_data(tensor) if is_dtensor(tensor) else tensor
