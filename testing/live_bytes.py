"""Count the bytes of live tensors, now and at the worst moment: to the byte, on any device.

Memory that an operator uses only while it runs is not seen. What it leaves behind is seen, also if only
autograd holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..parallel_state.engine import local_data
from .operators import tensors_in


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the storages that operators make while this context is entered, and of those given
    at first.

    ``LiveBytes(model.parameters())`` counts the parameters too. ``now``: the bytes alive. ``peak``: the most
    bytes after any operator. A storage that was emptied (FSDP's) counts as empty, and so does one on the meta
    device, which has no memory.
    """

    def __init__(self, *first: Any) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._most: dict[int, int] = {}  # the most bytes that each of them has had
        self._note(list(_storages([list(one) if isinstance(one, Iterator) else one for one in first])))
        self.peak = self.now

    @property
    def now(self) -> int:
        # Loop over a copy: another thread may drop a storage meanwhile, which removes it from the dict.
        alive = [storage for known in tuple(self._storages.values()) if (storage := known()) is not None]
        return sum(storage.nbytes() for storage in alive)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id(storage): storage for storage in _storages([args, kwargs or {}])}
        out = func(*args, **(kwargs or {}))
        # A view of what is not counted is not counted either.
        self._note([storage for storage in _storages(out) if id(storage) not in given])
        for key, storage in given.items():
            if key in self._most:
                self._most[key] = max(self._most[key], storage.nbytes())
        if sum(tuple(self._most.values())) > self.peak:  # or there are no more: asking each is slow
            self.peak = max(self.peak, self.now)
        return out

    def _note(self, storages: list[torch.UntypedStorage]) -> None:
        for storage in storages:
            self._storages[id(storage)] = weakref.ref(storage, partial(self._forget, id(storage)))
            self._most[id(storage)] = storage.nbytes()

    def _forget(self, key: int, gone: object) -> None:
        self._storages.pop(key, None)
        self._most.pop(key, None)


def _storages(value: object) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of all tensors in nested lists, tuples and dicts that have memory."""
    for tensor in tensors_in(value):
        if tensor.device.type != "meta":
            yield (local_data(tensor) if isinstance(tensor, DTensor) else tensor).untyped_storage()
